"""A draft that a device is at is verified by the target behind it, or told of as any other: never both."""

from __future__ import annotations

from itertools import product

import pytest

from outrider.models.pending_draft import NUM_BEST, PendingDraft
from tests.support.pending_drafts import pending_draft

NUM_STEPS, NUM_CHAINS = 4, 3


def a_draft() -> PendingDraft:
    """Three chains, of which the last one is nobody's; no token stands in two places."""
    chains = [
        [[1000 * (1 + chain) + 10 * step + rank for rank in range(NUM_BEST)] for step in range(1, NUM_STEPS + 1)]
        for chain in range(NUM_CHAINS)
    ]
    return pending_draft([7, 8, 9], chains, [("a", 5), ("b", 6)])


def test_it_has_as_many_steps_as_tokens_of_a_chain() -> None:
    assert a_draft().num_steps == NUM_STEPS


def test_places_are_those_of_the_flat_tokens() -> None:
    draft = a_draft()
    flat = draft.tokens.token_ids.flatten()
    for chain, step, rank in product(range(NUM_CHAINS), range(1, NUM_STEPS + 1), range(NUM_BEST)):
        assert flat[draft.place(chain, step, rank)] == 1000 * (1 + chain) + 10 * step + rank
    assert [flat[draft.place(chain, 0)].item() for chain in range(NUM_CHAINS)] == [7, 8, 9]


def test_the_best_token_of_a_step_is_meant_where_no_rank_is_named() -> None:
    draft = a_draft()
    assert draft.place(1, 2) == draft.place(1, 2, 0)


def test_one_that_was_claimed_before_its_end_goes_no_further() -> None:
    draft = a_draft()
    assert draft.claim()
    assert draft.end([[[1, 2, 3]], []])
    assert draft.found() == [[[1, 2, 3]], []]


def test_one_that_has_ended_is_not_to_be_had() -> None:
    draft = a_draft()
    assert not draft.end([[], []])
    assert not draft.claim()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_nothing_is_found_before_the_end_whose_time_is_kept(*, is_claimed: bool) -> None:
    draft = a_draft()
    assert not is_claimed or draft.claim()
    assert draft.ended_at == 0.0
    draft.end([[], []])
    assert draft.ended_at > 0.0


def test_a_token_that_the_target_does_not_have_is_some_other_one() -> None:
    draft = pending_draft([7], [[[9, 8, 300]]], [("0", 3)])
    assert draft.tokens_with([5], 100).tolist() == [7, 7, 7, 9, 8, 99, 5]


def test_what_comes_too_late_is_not_found_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.pending_draft.MAX_WAIT_S", 0.0)
    draft = a_draft()
    assert draft.claim()
    assert draft.found() == ()
    draft.end([[[1, 2, 3]], []])
    assert draft.found() == (), "who verifies it has decided by that"
