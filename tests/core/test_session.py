"""A session's text is the sequence of the target's own draws, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.methods import PEARL
from outrider.core.params import SamplingParams, Source
from outrider.core.session import FinishReason, Session, SessionSpec, ending_of
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import TokenId
from tests.support.trees import add_path, output_of

VOCAB_SIZE = 4
TOKENS = st.integers(0, VOCAB_SIZE - 1)
SPEC = SessionSpec(
    session_id="s",
    prompt_token_ids=(0,),
    sampling=SamplingParams(seed=1),
    speculation=SpeculationParams(PEARL, num_speculative_tokens=4, lookahead=8),
    vocab_size=VOCAB_SIZE,
    max_tokens=12,
)


def target_draw(context: tuple[TokenId, ...]) -> TokenId:
    """A toy target: its draw is a fixed function of everything before it."""
    return hash(context) % VOCAB_SIZE


def plain_text(spec: SessionSpec) -> tuple[list[TokenId], FinishReason]:
    """The target's text without speculation, computed without a session."""
    tokens: list[TokenId] = list(spec.resume_token_ids)
    while len(tokens) < spec.max_tokens:
        token_id = target_draw((*spec.prompt_token_ids, *tokens))
        if token_id in spec.stop_token_ids:
            return tokens, FinishReason.STOP
        tokens.append(token_id)
    return tokens, FinishReason.LENGTH


def run(session: Session, drafts: st.DataObject | None) -> None:
    """Rounds to the end; before each, a draft that is right or wrong at random."""
    while session.finish_reason is None:
        if drafts is not None:
            base_len = drafts.draw(st.integers(1, len(session.committed)))
            path = list(session.committed[base_len:])
            for _ in range(drafts.draw(st.integers(0, 6))):
                right = target_draw((*session.committed[:base_len], *path))
                path.append(right if drafts.draw(st.booleans()) else drafts.draw(TOKENS))
            add_path(session.tree, base_len, path, -0.1, Source.DRAFT)
        chain = session.next_chain()
        context = tuple(session.committed)
        draws = []
        for node in [None, *chain]:
            context = context if node is None else (*context, node.token_id)
            draws.append(target_draw(context))
        session.apply(chain, draws)


@given(
    data=st.data(),
    max_tokens=st.integers(1, 20),
    stop=st.frozensets(TOKENS, max_size=1),
    gamma=st.integers(1, 6),
    prompt=st.lists(TOKENS, min_size=1, max_size=3),
)
def test_the_text_is_the_targets_whatever_was_drafted(
    data: st.DataObject, max_tokens: int, stop: frozenset[int], gamma: int, prompt: list[int]
) -> None:
    spec = replace(
        SPEC,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        stop_token_ids=stop,
        speculation=SpeculationParams(PEARL, num_speculative_tokens=gamma, lookahead=16),
    )
    session = Session(spec)
    run(session, data)
    assert (output_of(session), session.finish_reason) == plain_text(spec)
    statistics = session.statistics
    assert statistics.num_accepted_tokens <= statistics.num_drafted_tokens
    assert len(output_of(session)) <= statistics.num_accepted_tokens + statistics.num_rounds


@given(num_resumed=st.integers(1, 11))
def test_a_resumed_generation_goes_on_as_the_interrupted_one_would_have(num_resumed: int) -> None:
    whole = Session(SPEC)
    run(whole, None)
    resumed = Session(replace(SPEC, resume_token_ids=tuple(output_of(whole)[:num_resumed])))
    assert resumed.num_output_tokens == num_resumed
    run(resumed, None)
    assert output_of(resumed) == output_of(whole)


def test_only_a_generation_with_all_its_tokens_is_over_before_it_begins() -> None:
    assert ending_of(replace(SPEC, resume_token_ids=(1,) * (SPEC.max_tokens - 1))) is None
    ending = ending_of(replace(SPEC, resume_token_ids=(1,) * SPEC.max_tokens))
    assert ending is not None
    assert (ending.finish_reason, ending.token_ids) == (FinishReason.LENGTH, ())
    assert ending.base_len == len(SPEC.prompt_token_ids) + SPEC.max_tokens


def chain_session(*tokens: TokenId, **changes: object) -> Session:
    session = Session(replace(SPEC, **changes))  # type: ignore[arg-type]
    add_path(session.tree, len(session.committed), tokens, -0.1, Source.DRAFT)
    return session


def test_a_verdict_keeps_the_tokens_that_equal_the_draws_and_adds_the_first_that_differs() -> None:
    session = chain_session(1, 2, 3)
    verdict = session.apply(session.next_chain(), [1, 2, 0, 3])
    assert verdict.token_ids == (1, 2, 0)
    assert verdict.sources == (Source.DRAFT, Source.DRAFT, Source.TARGET)
    assert (verdict.num_accepted, verdict.num_drafted, verdict.rejected_token_ids) == (2, 3, (3,))


def test_a_whole_chain_is_followed_by_the_draw_after_it() -> None:
    session = chain_session(1, 2)
    verdict = session.apply(session.next_chain(), [1, 2, 3])
    assert verdict.token_ids == (1, 2, 3)
    assert verdict.rejected_token_ids == ()


def test_a_hit_is_a_next_token_that_the_tree_has() -> None:
    session = chain_session(1, 2, 3, 1, 2)
    session.apply(session.next_chain(), [1, 2, 3, 1, 2])
    assert session.statistics.num_hits == 1
    session.apply(session.next_chain(), [3])
    assert session.statistics.num_hits == 1


def test_a_hit_is_ready_if_more_was_drafted_behind_the_next_token() -> None:
    session = chain_session(1, 2, 3)
    session.apply(session.next_chain()[:1], [1, 2])
    assert (session.statistics.num_hits, session.statistics.num_ready_hits) == (1, 1), "the third token stands behind"
    session.apply([], [3])
    assert (session.statistics.num_hits, session.statistics.num_ready_hits) == (2, 1), "nothing does"


def test_a_stop_token_inside_the_accepted_run_ends_the_text_before_it() -> None:
    session = chain_session(1, 2, 3, stop_token_ids=frozenset({2}))
    verdict = session.apply(session.next_chain(), [1, 2, 3, 0])
    assert (verdict.token_ids, verdict.sources) == ((1,), (Source.DRAFT,))
    assert (verdict.finish_reason, verdict.stop_token_id) == (FinishReason.STOP, 2)
    assert (verdict.num_accepted, verdict.accepted_rows) == (3, (1, 2, 3)), "the target has accepted the others, too"
    assert session.statistics.num_accepted_tokens == 1


def test_a_stop_token_at_once_commits_nothing() -> None:
    session = chain_session(stop_token_ids=frozenset({2}))
    verdict = session.apply([], [2])
    assert verdict.token_ids == ()
    assert output_of(session) == []


@pytest.mark.parametrize(("max_tokens", "chain_len"), [(1, 0), (2, 1), (3, 2), (9, 4)])
def test_a_chain_is_never_longer_than_what_can_be_emitted(max_tokens: int, chain_len: int) -> None:
    session = chain_session(1, 1, 1, 1, 1, max_tokens=max_tokens)
    assert len(session.next_chain()) == chain_len
