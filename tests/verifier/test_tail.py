"""Retrieved tokens after the chain that the draft model has drafted: DOUBLE on the target's side."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.methods import DOUBLE
from outrider.core.methods.double import DoubleParams
from outrider.core.params import AcceptanceRule, SamplingParams, Source
from outrider.core.retrieval.prior import PriorTable
from outrider.core.session import SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import Draft, Node, SparseRow
from outrider.rounds.timings import EngineTimings
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.round import Forward
from outrider.verifier.session import VerifySession

GAMMA = 4
PROMPT = (1, 2, 3)
TEXT = [*PROMPT, *range(10, 30)]
"""What the prior knows."""
FREE_ROWS = ForwardTimes({1: 10.0})
DEAR_ROWS = ForwardTimes({1: 10.0, 32: 320.0})
FORWARD = Forward(started=0.0, ended=0.2, duration_ms=10.0)


class Cache:
    """Slots without content."""

    length = len(PROMPT) - 1

    def keep(self, length: int, slots: list[int]) -> None:
        self.length = length + len(slots)

    def publish(self, token_ids: object) -> None: ...


def session_of(
    times: ForwardTimes = FREE_ROWS, temperature: float = 0.0, max_tokens: int = 100, **fields: Any
) -> VerifySession:
    params = SpeculationParams(DOUBLE, GAMMA, **fields)
    spec = SessionSpec("s", PROMPT, SamplingParams(temperature=temperature), params, 1000, max_tokens)
    tiers = SimpleNamespace(prior=PriorTable.build([TEXT]), shared=None)
    listener, timings = cast(Any, None), EngineTimings(times)
    return VerifySession(spec, listener, cast(Any, Cache()), timings, RoundCounts(), cast(Any, tiers), 0.0)


def draft(*token_ids: int, logprobs: list[float] | None = None, q: SparseRow | None = None) -> Draft:
    """A chain of the draft model after the prompt."""
    count = len(token_ids)
    offsets = [0, *[1] * (count - 1)]
    return Draft(
        len(PROMPT), 1, offsets, token_ids, logprobs or [-0.01] * count, Source.DRAFT, [q] * count if q else ()
    )


def nodes_of(session: VerifySession) -> list[Node]:
    session.round.is_ready(1.0)
    return session.round.nodes


def tokens_of(session: VerifySession) -> list[int]:
    return [node.token_id for node in nodes_of(session)]


@pytest.mark.parametrize("max_phrase_len", [1, 6, 16])
def test_as_many_tokens_as_the_parameter_says_stand_behind_the_prefix_or_the_whole_chain(max_phrase_len: int) -> None:
    double = DoubleParams(max_phrase_len=max_phrase_len)
    assert tokens_of(session_of(own=(double,))) == TEXT[3 : 3 + max_phrase_len]
    session = session_of(own=(double,))
    session.add_draft(draft(10, 11, 12, 13), 0.1)
    assert tokens_of(session) == TEXT[3 : 3 + GAMMA + max_phrase_len]
    assert [node.source for node in session.round.nodes] == [Source.DRAFT] * GAMMA + [Source.PRIOR] * max_phrase_len


def test_the_tail_stands_where_the_chain_was_cut_beside_what_was_too_improbable() -> None:
    session = session_of(min_path_probability=0.2, own=(DoubleParams(max_phrase_len=3),))
    session.add_draft(draft(10, 11, 99, logprobs=[-0.01, -0.01, math.log(0.1)]), 0.1)
    assert tokens_of(session) == [10, 11, 12, 13, 14]


def test_the_tail_stands_behind_a_full_chain_though_more_was_drafted() -> None:
    session = session_of(own=(DoubleParams(max_phrase_len=3),))
    session.add_draft(draft(10, 11, 12, 13, 98, 99), 0.1)
    assert tokens_of(session) == [10, 11, 12, 13, 14, 15, 16]


def test_rows_that_cost_more_than_they_bring_are_left_out_of_the_tail_and_not_out_of_the_chain() -> None:
    session = session_of(DEAR_ROWS, own=(DoubleParams(max_phrase_len=16),))
    session.add_draft(draft(10, 11, 12, 13), 0.1)
    assert tokens_of(session) == [10, 11, 12, 13]


def test_the_tail_ends_where_the_generation_does() -> None:
    session = session_of(max_tokens=6)
    session.add_draft(draft(10, 11, 12, 13), 0.1)
    assert tokens_of(session) == [10, 11, 12, 13, 14], "the sixth token is the target's own"


def test_tokens_that_were_kept_behind_a_draft_are_counted() -> None:
    session = session_of(own=(DoubleParams(max_phrase_len=3),))
    session.add_draft(draft(10, 11, 12, 13), 0.1)
    draws = [*TEXT[3 : 3 + len(nodes_of(session))], 77]
    verdict = session.settle(draws, FORWARD)
    assert verdict.sources == (*[Source.DRAFT] * GAMMA, *[Source.PRIOR] * 3, Source.TARGET)
    assert session.generation.statistics.num_tail_tokens == 3
    # Retrieved tokens instead of a draft are no tail.
    alone = session_of(own=(DoubleParams(max_phrase_len=3),))
    alone.settle([*TEXT[3 : 3 + len(nodes_of(alone))], 77], FORWARD)
    assert alone.generation.statistics.accepted_by_source == {Source.PRIOR: 3}
    assert alone.generation.statistics.num_tail_tokens == 0


def test_without_retrieval_on_the_targets_side_there_is_no_tail() -> None:
    session = session_of(own=(DoubleParams(target_retrieval=False),))
    session.add_draft(draft(10, 11), 0.1)
    assert tokens_of(session) == [10, 11]


def test_a_draft_on_the_way_of_the_tail_stays_the_draft_models() -> None:
    session = session_of(own=(DoubleParams(max_phrase_len=2),))
    session.add_draft(draft(10, 11, 12, 13, 14), 0.1)
    assert [node.source for node in nodes_of(session)] == [Source.DRAFT] * 5 + [Source.PRIOR]


def test_under_the_ratio_rule_a_sample_is_not_judged_because_the_tail_agrees_with_it() -> None:
    row = SparseRow((10, 11, 12, 13, 14, 98), (1, 1, 1, 1, 1, 1))
    for beyond in (14, 98):  # agrees with the tail, and does not
        session = session_of(temperature=1.0, acceptance_rule=AcceptanceRule.RATIO, shared_noise=False)
        session.add_draft(draft(10, 11, 12, 13, beyond, q=row), 0.1)
        assert tokens_of(session) == [10, 11, 12, 13]
    session = session_of(temperature=1.0, acceptance_rule=AcceptanceRule.RATIO, shared_noise=False)
    session.add_draft(draft(10, 11, 12, 13, q=row), 0.1)
    assert tokens_of(session)[:5] == [10, 11, 12, 13, 14], "nothing was drawn there"
    assert session.round.nodes[4].q is None
