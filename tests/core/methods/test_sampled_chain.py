"""Growth of a chain of samples: its length and its messages never depend on what was drawn."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.growth import Candidate, GrowthPolicy
from outrider.core.methods import DOUBLE, PEARL, SPECULATIVE, growth_policy
from outrider.core.methods.chain import ChainGrowth, SampledChainGrowth
from outrider.core.params import AcceptanceRule, Source
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import DraftTree, SparseRow

VOCAB_SIZE = 50
PROBABILITIES = st.floats(0.01, 1.0)
SAMPLED = [SPECULATIVE, PEARL]


def params(method: Method, probability: float = 0.0, gamma: int = 4) -> SpeculationParams:
    return SpeculationParams(method, gamma, 12, probability, acceptance_rule=AcceptanceRule.RATIO)


class Drafter:
    """A policy, its tree, and the numbers of nodes at which messages were sent."""

    def __init__(self, policy: GrowthPolicy) -> None:
        self.policy = policy
        self.tree = DraftTree([0], VOCAB_SIZE)
        self.num_grown = 0
        self.num_unsent = 0
        self.messages: list[int] = []

    def grow(self, probability: float) -> bool:
        """One forward that draws a token of this probability. False = there is nothing to grow."""
        expansion = self.policy.next_expansion(self.tree)
        if expansion is None:
            return False
        self.num_grown += 1
        candidate = Candidate(self.num_grown % VOCAB_SIZE, math.log(probability), SparseRow([0], [1]))
        for parent, child in self.policy.children(self.tree, expansion, [[candidate]]):
            self.tree.add(parent, child.token_id, child.logprob, Source.DRAFT, child.q)
        self.num_unsent += 1
        is_idle = self.policy.next_expansion(self.tree) is None
        if is_idle or self.policy.is_message(self.tree, self.num_unsent):
            self.messages.append(self.num_grown)
            self.num_unsent = 0
        return True

    def commit(self, num_known: int, *, hits: bool) -> None:
        """Commits the next tokens of the chain, and one that is not on it unless the commit `hits`."""
        chain = [node.token_id for node in self.tree.best_chain(num_known)]
        tokens = chain if hits and chain else [*chain, VOCAB_SIZE - 1]
        known = self.tree.commit(tokens)
        self.policy.committed(self.tree, len(tokens), known)
        if not self.tree.root.children:
            self.num_unsent = 0

    def grow_all(self, probability: float) -> list[int]:
        while self.grow(probability):
            pass
        return self.messages


@pytest.mark.parametrize("method", [*SAMPLED, DOUBLE])
def test_the_sampled_chains_of_the_ratio_rule_have_this_policy(method: Method) -> None:
    assert isinstance(growth_policy(params(method)), SampledChainGrowth)


@pytest.mark.parametrize("method", SAMPLED)
def test_those_of_the_match_rule_have_not(method: Method) -> None:
    assert isinstance(growth_policy(SpeculationParams(method)), ChainGrowth)


def test_speculative_drafts_one_chain_and_waits_for_the_commit() -> None:
    assert Drafter(growth_policy(params(SPECULATIVE))).grow_all(0.9) == [4]


def test_pearl_goes_on_to_its_lookahead() -> None:
    assert Drafter(growth_policy(params(PEARL))).grow_all(0.9) == [4, 8, 12]


def test_double_sends_every_forward_at_once() -> None:
    """A forward that agrees with a retrieved phrase yields more tokens, so waiting for a number of tokens favours
    it."""
    assert Drafter(growth_policy(params(DOUBLE))).grow_all(0.9) == list(range(1, 13))


@pytest.mark.parametrize("method", SAMPLED)
@given(
    probability=st.sampled_from([0.0, 0.05, 0.3]),
    one=st.lists(PROBABILITIES, min_size=40, max_size=40),
    other=st.lists(PROBABILITIES, min_size=40, max_size=40),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans()), max_size=6),
)
def test_what_was_drawn_decides_nothing(
    method: Method, probability: float, one: list[float], other: list[float], steps: list[tuple[int, int, bool]]
) -> None:
    """Two sessions with different draws, of which the target keeps equally many tokens, go on in the same way."""
    drafters = [Drafter(growth_policy(params(method, probability))) for _ in range(2)]
    for num_forwards, num_known, hits in steps:
        for drafter, drawn in zip(drafters, (one, other), strict=True):
            for _ in range(num_forwards):
                drafter.grow(drawn[drafter.num_grown])
            drafter.commit(num_known, hits=hits)
    assert drafters[0].num_grown == drafters[1].num_grown
    assert drafters[0].messages == drafters[1].messages


def message_len(policy: GrowthPolicy) -> int:
    assert isinstance(policy, SampledChainGrowth)
    return policy.message_len


def test_a_message_is_as_long_as_the_rate_of_acceptance_is_worth() -> None:
    drafter = Drafter(growth_policy(params(PEARL, 0.2, gamma=8)))
    assert message_len(drafter.policy) == 4  # .7 ** 4 is still above .2, .7 ** 5 is not
    lengths = []
    for _ in range(40):
        drafter.grow_all(0.9)
        drafter.commit(0, hits=False)
        lengths.append(message_len(drafter.policy))
    assert lengths[-1] == 1
    assert all(later <= earlier for earlier, later in pairwise(lengths))
    for _ in range(40):
        drafter.grow_all(0.01)
        drafter.commit(12, hits=True)
    assert message_len(drafter.policy) == 8


def test_growth_ends_at_twice_the_length_that_is_worth_verifying() -> None:
    drafter = Drafter(growth_policy(params(PEARL, 0.4, gamma=8)))
    assert message_len(drafter.policy) == 2
    assert drafter.grow_all(0.9) == [2, 4]


def test_what_is_unsent_when_a_commit_comes_is_sent_when_growth_ends() -> None:
    drafter = Drafter(growth_policy(params(PEARL, 0.2)))
    for _ in range(6):
        drafter.grow(0.9)
    assert drafter.messages == [4]
    drafter.commit(1, hits=True)
    drafter.grow_all(0.9)
    assert drafter.messages[-1] == drafter.num_grown
    assert drafter.num_unsent == 0
