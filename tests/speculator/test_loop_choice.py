"""The number of steps that a draft model makes at once follows the useful length of its chains."""

from __future__ import annotations

import pytest

from outrider.speculator.loop_choice import LoopChoice

STEP_S = 0.001


class Loops:
    """Drafts chains of some length by loops of four, eight or twelve steps."""

    def __init__(self, gap_s: float) -> None:
        self.choice = LoopChoice()
        self._gap_s = gap_s
        self._now = 0.0

    def draft(self, chain_len: int, most: int = 8) -> list[int]:
        """Drafts a chain that may have so many tokens; returns the lengths of its loops."""
        made: list[int] = []
        while sum(made) < chain_len:
            length = self.choice.choose([each for each in (4, 8, 12) if each <= most - sum(made)])
            ended = self._now + length * STEP_S
            num_used = min(length, chain_len - sum(made))
            goes_on = sum(made) + length < chain_len
            self.choice.observe(length, self._now, ended, num_used=num_used, goes_on=goes_on)
            made.append(length)
            self._now = ended + (self._gap_s if goes_on else 1.0)
        return made


def test_where_there_is_one_length_it_is_taken() -> None:
    assert LoopChoice().choose([8]) == 8
    assert LoopChoice().choose([4]) == 4


def test_it_begins_with_the_shorter_one_and_follows_the_chains() -> None:
    loops = Loops(gap_s=0.001)
    assert loops.draft(8) == [4, 4]
    assert [loops.draft(8) for _ in range(20)][-1] == [8]
    # Old chains are forgotten.
    assert [loops.draft(3) for _ in range(20)][-1] == [4]
    assert [loops.draft(8) for _ in range(60)][-1] == [8]


@pytest.mark.parametrize(("chain_len", "length"), [(3, 4), (8, 8), (12, 12)])
def test_of_three_lengths_it_takes_that_of_the_chains(chain_len: int, length: int) -> None:
    loops = Loops(gap_s=0.001)
    for before in (12, 3):
        for _ in range(60):
            loops.draft(before, most=12)
    assert [loops.draft(chain_len, most=12) for _ in range(60)][-1] == [length]


def test_few_chains_of_twelve_among_those_of_eight_are_not_worth_twelve_steps_of_all() -> None:
    loops = Loops(gap_s=0.001)
    for _ in range(60):
        for chain_len in (8, 8, 8, 12):
            loops.draft(chain_len, most=12)
    assert loops.draft(12, most=12) == [8, 4]


def test_chains_that_may_not_be_longer_do_not_say_that_others_are_not() -> None:
    loops = Loops(gap_s=0.001)
    assert [loops.draft(12, most=12) for _ in range(30)][-1] == [12]
    for _ in range(60):
        loops.draft(8, most=8)
    assert loops.draft(12, most=12) == [12]


@pytest.mark.parametrize(("gap_s", "length"), [(0.0003, 4), (0.002, 8)])
def test_steps_in_vain_are_weighed_against_gaps(gap_s: float, length: int) -> None:
    loops = Loops(gap_s)
    for _ in range(60):
        # Three of four chains go on after four steps: loops of four cost three gaps, loops of eight waste four steps.
        for chain_len in (8, 8, 8, 3):
            loops.draft(chain_len)
    assert loops.draft(8)[0] == length
