"""Rounds behind drafts that the host does not know yet: when there are some, of which rows, and what comes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from outrider.core.auto.strategies import Strategy
from outrider.core.costs import ForwardTimes
from outrider.core.params import (
    AcceptanceRule,
    BestFirstParams,
    Method,
    Rows,
    SamplingParams,
    Source,
    SpeculationParams,
)
from outrider.core.reports import ReportParams
from outrider.core.session import Session, SessionSpec
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft, Node
from outrider.models.pending_draft import NUM_BEST, PendingDraft
from outrider.verifier.engine import Engine
from outrider.verifier.rounds_behind_drafts import RoundBehind, RoundsBehindDrafts, RowsBehind
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings
from tests.support.pending_drafts import pending_draft
from tests.support.stepped_engine import GREEDY, OPENED_AT, Asynchronous, add_session, pool_of

CHEAP, STEEP = ForwardTimes({1: 10.0, 101: 11.0}), ForwardTimes({1: 10.0, 101: 60.0})
"""Devices for which another row costs next to nothing, and half a millisecond."""
MANY = 99
Found = Sequence[Sequence[Sequence[int]]]


def in_turns(
    engine: Engine, sampling: SamplingParams = GREEDY, method: Method = Method.BEST_FIRST, **fields: Any
) -> VerifySession:
    """A session of three tokens that takes turns with the draft model, and waits for its draft."""
    rows = Rows.TREE if method is Method.BEST_FIRST else Rows.CHAIN
    fields = {"best_first": BestFirstParams(serial=True), "rows": rows, "shares_gpu": True, **fields}
    session = add_session(engine, method, 3, 2, sampling, **fields)
    session.attach()
    session.add_draft(Draft(3, 1, [], [], [], Source.DRAFT), OPENED_AT)
    return session


def a_draft(*session_ids: str, num_steps: int = 4, base_len: int = 3, **options: Any) -> PendingDraft:
    """A draft whose chains say 10 11 12 ..., 110 111 ... and so on; beside the first tokens stand 20 and 30."""
    chains = [
        [[100 * chain + 10 * (1 + rank) + step for rank in range(NUM_BEST)] for step in range(num_steps)]
        for chain in range(len(session_ids))
    ]
    return pending_draft([2] * len(chains), chains, [(each, base_len) for each in session_ids], **options)


def rounds(times: ForwardTimes = CHEAP) -> RoundsBehindDrafts:
    return RoundsBehindDrafts(EngineTimings(times))


def plan(
    draft: PendingDraft, sessions: Sequence[VerifySession], max_num_nodes: int = MANY, times: ForwardTimes = CHEAP
) -> RoundBehind | None:
    return rounds(times).plan(draft, sessions, max_num_nodes)


def rows_of(
    session: VerifySession,
    max_num_nodes: int = MANY,
    *,
    num_steps: int = 4,
    behind_drafts: RoundsBehindDrafts | None = None,
) -> tuple[int, int]:
    """Returns depth and width of a session's round behind a draft that is its own alone."""
    draft = a_draft(session.session.spec.session_id, num_steps=num_steps)
    behind = (behind_drafts or rounds()).plan(draft, [session], max_num_nodes)
    assert behind is not None
    rows = behind.rows[session]
    assert rows.chain == 0
    return rows.depth, rows.width


def rows_behind(chain: int, depth: int, width: int, known: Sequence[Node] = ()) -> RowsBehind:
    return RowsBehind(chain, depth, width, known)


def test_each_session_has_the_chain_that_bears_its_name(engine: Engine) -> None:
    first, second = in_turns(engine), in_turns(engine)
    behind = plan(a_draft("1", "0"), [first, second])
    assert behind is not None
    assert [behind.rows[session].chain for session in (first, second)] == [1, 0]


def test_sessions_that_are_not_all_of_the_draft_are_not_verified_behind_it(engine: Engine) -> None:
    first, second = in_turns(engine), in_turns(engine)
    assert plan(a_draft("0"), [first]) is not None
    # The other one would wait for a round of its own.
    assert plan(a_draft("0"), [first, second]) is None
    assert plan(a_draft("0", "1"), [first]) is None


@pytest.mark.parametrize("base_len", [2, 4])
def test_a_chain_that_follows_other_tokens_is_not_followed(engine: Engine, base_len: int) -> None:
    assert plan(a_draft("0", base_len=base_len), [in_turns(engine)]) is None


def set_spec(session: VerifySession, **fields: Any) -> None:
    session.session = Session(replace(session.session.spec, **fields))


OTHERS: dict[str, Callable[[Engine], VerifySession]] = {
    "one on a GPU of its own": lambda engine: in_turns(engine, shares_gpu=False),
    "one whose target does not wait": lambda engine: in_turns(engine, best_first=BestFirstParams()),
    "the ratio rule": lambda engine: in_turns(
        engine, SamplingParams(seed=1), Method.SPECULATIVE, acceptance_rule=AcceptanceRule.RATIO
    ),
    "a chain with what is retrieved behind it": lambda engine: in_turns(
        engine, rows=Rows.CHAIN, retrieval=True, sources=(Source.RECYCLED,)
    ),
    "penalties": lambda engine: in_turns(engine, SamplingParams(temperature=0.0, repetition_penalty=1.5)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_no_round_of_such_a_session_begins_before_its_draft_is_known(engine: Engine, other: str) -> None:
    session = OTHERS[other](engine)
    assert plan(a_draft("0"), [session]) is None
    assert plan(a_draft("0", "1"), [session, in_turns(engine)]) is None


@pytest.mark.parametrize(
    "fields",
    [{"report": ReportParams(logprobs=1)}, {"matcher": SimpleNamespace(is_over=False)}],
    ids=["log-probabilities", "a structure"],
)
def test_no_round_begins_so_early_whose_rows_are_read_or_drawn_otherwise(engine: Engine, fields: Any) -> None:
    session = in_turns(engine)
    set_spec(session, **fields)
    assert plan(a_draft("0"), [session]) is None


def test_who_reads_a_prompt_is_not_verified_behind_a_draft(engine: Engine) -> None:
    session = add_session(engine, Method.BEST_FIRST, 50, 0, shares_gpu=True)
    assert plan(a_draft("0", base_len=50), [session]) is None


def test_what_is_there_to_be_verified_is_verified_together_with_the_chain(engine: Engine) -> None:
    session, other = in_turns(engine, rows=Rows.TREE), in_turns(engine, rows=Rows.TREE)
    for each in (session, other):
        each.add_draft(Draft(3, 1, [0, 1, 0], [10, 50, 60], [-0.1, -0.2, -1.0], Source.DRAFT), OPENED_AT)
    behind = plan(a_draft("0", "1", num_steps=2), [session, other], times=STEEP)
    assert behind is not None
    assert [[node.token_id for node in behind.rows[each].known] for each in (session, other)] == [[10, 50, 60]] * 2
    tokens = behind.tokens(1000).tolist()
    first, second = behind.begin(OPENED_AT)
    assert [tokens[place] for place in first.token_ids] == [2, 10, 11, 10, 50, 60]
    assert [tokens[place] for place in second.token_ids] == [2, 110, 111, 10, 50, 60]
    # What is known of the chain is not verified as part of it: the device does not know that it is the same.
    assert first.seen()[:, 2:].astype(int).tolist()[3:] == [
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    behind.draft.end([[[10, 20, 30], [11, 21, 31]], [[110, 120, 130], [111, 121, 131]]])
    rounds().settle(behind, session, range(6), ())
    assert [node.token_id for node in session.nodes] == [10, 11, 50, 60]
    assert session.rows == [0, 1, 2, 4, 5]
    rounds().settle(behind, other, range(6), ())
    assert [node.token_id for node in other.nodes] == [110, 111, 10, 50, 60]
    assert other.rows == [0, 1, 2, 3, 4, 5]


def test_of_what_is_there_as_much_is_verified_as_there_is_room_for_behind_the_chain(engine: Engine) -> None:
    session = in_turns(engine, rows=Rows.TREE)
    session.add_draft(Draft(3, 1, [0, 1, 0], [10, 50, 60], [-0.1, -0.2, -1.0], Source.DRAFT), OPENED_AT)
    found = [plan(a_draft("0"), [session], most) for most in (4, 6, 12)]
    rows = [behind.rows[session] for behind in found if behind is not None]
    assert [(each.depth, each.width, len(each.known)) for each in rows] == [(4, 0, 0), (4, 0, 2), (4, 1, 3)]


def test_no_chain_is_longer_than_the_draft_or_than_may_still_be_emitted(engine: Engine) -> None:
    session = in_turns(engine)
    assert rows_of(session)[0] == 4
    assert rows_of(session, num_steps=12)[0] == 8, "as many as are drafted at a time"
    # One of the tokens is the target's own.
    set_spec(session, max_tokens=4)
    assert rows_of(session)[0] == 3
    set_spec(session, max_tokens=1)
    assert plan(a_draft("0"), [session]) is None


def test_no_session_has_more_rows_than_its_request_says_or_its_share_is(engine: Engine) -> None:
    unnamed, named = in_turns(engine), in_turns(engine, max_rows=6)
    assert [rows_of(unnamed, most) for most in (3, 7, 8, 11, 12)] == [(3, 0), (4, 0), (4, 1), (4, 1), (4, 2)]
    assert [rows_of(named, most) for most in (3, MANY)] == [(3, 0), (4, 0)]
    # Whatever the request says, all share the rows of a forward.
    assert rows_of(in_turns(engine, max_rows=32), 8) == (4, 1)


def test_who_names_no_number_has_the_rows_that_the_server_gives(engine: Engine) -> None:
    few = RoundsBehindDrafts(EngineTimings(CHEAP, max_num_rows=9))
    assert rows_of(in_turns(engine), behind_drafts=few) == (4, 1)
    assert rows_of(in_turns(engine, max_rows=20), behind_drafts=few) == (4, 2)
    assert rows_of(in_turns(engine, rows=Rows.CHAIN), num_steps=12, behind_drafts=few) == (8, 0)


def test_one_session_of_few_rows_keeps_all_from_more_of_them(engine: Engine) -> None:
    sessions = [in_turns(engine), in_turns(engine, max_rows=8)]
    behind = plan(a_draft("0", "1"), sessions)
    assert behind is not None
    assert [behind.rows[session][:3] for session in sessions] == [(0, 4, 1), (1, 4, 1)]


def test_who_may_emit_one_token_more_is_verified_without_a_draft_beside_others(engine: Engine) -> None:
    last, other = in_turns(engine), in_turns(engine)
    set_spec(last, max_tokens=1)
    behind = plan(a_draft("0", "1"), [last, other])
    assert behind is not None
    assert [behind.rows[session].depth for session in (last, other)] == [0, 4]
    assert behind.begin(OPENED_AT)[0].token_ids == [behind.draft.place(0, 0)]


def test_tokens_beside_the_chain_are_verified_where_their_rows_are_cheap(engine: Engine) -> None:
    session = in_turns(engine)
    assert rows_of(session, behind_drafts=rounds(CHEAP)) == (4, 2)
    assert rows_of(session, behind_drafts=rounds(STEEP)) == (4, 0)


@pytest.mark.parametrize("times", [CHEAP, STEEP], ids=["cheap", "steep"])
@pytest.mark.parametrize(("drawn", "width"), [(10, 0), (20, 1), (30, 2), (99, 0)])
def test_tokens_beside_the_chain_are_verified_where_they_have_brought_something(
    engine: Engine, times: ForwardTimes, drawn: int, width: int
) -> None:
    session, behind_drafts = in_turns(engine), rounds(times)
    behind = RoundBehind(a_draft("0"), {session: rows_behind(0, 4, 0)})
    behind.draft.end([[[10, 20, 30], [11, 21, 31], [12, 22, 32], [13, 23, 33]]])
    for _ in range(40):
        behind_drafts.settle(behind, session, [drawn, 11, 12, 13, 14], ())
    assert rows_of(in_turns(engine), behind_drafts=behind_drafts) == (4, width)


def test_what_was_measured_of_tokens_beside_the_chain_does_not_bind_for_ever(engine: Engine) -> None:
    session, behind_drafts = in_turns(engine), rounds(STEEP)
    behind = RoundBehind(a_draft("0"), {session: rows_behind(0, 4, 0)})
    behind.draft.end([[[10, 20, 30], [11, 21, 31], [12, 22, 32], [13, 23, 33]]])
    # Right is what stands beside the third token of the chain; the whole chain; what stands beside its first one.
    for draws, width in ([10, 11, 22, 0, 0], 1), ([10, 11, 12, 13, 14], 0), ([20, 0, 0, 0, 0], 1):
        for _ in range(40):
            behind_drafts.settle(behind, session, draws, ())
        assert rows_of(in_turns(engine), behind_drafts=behind_drafts)[1] == width


def test_rows_are_the_last_token_the_chain_and_what_stands_beside_each_of_it(engine: Engine) -> None:
    first, second = in_turns(engine), in_turns(engine)
    draft = a_draft("0", "1", num_steps=2)
    behind = RoundBehind(draft, {first: rows_behind(0, 2, 2), second: rows_behind(1, 2, 1)})
    flat = draft.tokens.token_ids.flatten().tolist()
    segments = behind.begin(OPENED_AT)
    assert [[flat[place] for place in segment.token_ids] for segment in segments] == [
        [2, 10, 11, 20, 30, 21, 31],
        [2, 110, 111, 120, 121],
    ]
    assert [segment.position_ids for segment in segments] == [[2, 3, 4, 3, 3, 4, 4], [2, 3, 4, 3, 4]]
    assert all(segment.num_logits == len(segment.token_ids) for segment in segments)
    # What each row sees behind the two tokens that are in the cache.
    assert segments[1].seen()[:, 2:].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert not first.session.tree.num_nodes, "the tree has none of them before they are known"


def settled(
    engine: Engine, rows: RowsBehind, found: Sequence[Sequence[int]], num_draws: int
) -> tuple[list[int], list[int], VerifySession]:
    """Settles a session's round; returns the tokens of its nodes, the rows that mean something, and the session."""
    session = in_turns(engine)
    behind = RoundBehind(a_draft("0"), {session: rows})
    behind.draft.end([found])
    draws, followers = rounds().settle(behind, session, range(num_draws), [[(row, 1)] for row in range(num_draws)])
    assert session.rows is not None
    assert list(draws) == [row for ((row, _),) in followers] == list(session.rows)
    return [node.token_id for node in session.nodes], list(draws), session


def test_when_the_tokens_are_known_the_nodes_stand_in_the_tree(engine: Engine) -> None:
    token_ids, rows, session = settled(engine, rows_behind(0, 2, 2), [[10, 20, 30], [11, 21, 31]], 7)
    assert token_ids == [10, 11, 20, 30, 21, 31]
    assert rows == list(range(7))
    root = session.session.tree.root
    assert list(root.children) == [10, 20, 30]
    assert list(root.children[10].children) == [11, 21, 31]


def test_tokens_that_the_drafter_has_told_of_meanwhile_are_not_taken_for_others(engine: Engine) -> None:
    session = in_turns(engine)
    session.add_draft(Draft(3, 1, [0, 1, 0], [10, 11, 20], [-0.1, -0.1, -2.0], Source.DRAFT), OPENED_AT)
    behind = RoundBehind(a_draft("0"), {session: rows_behind(0, 2, 1)})
    behind.draft.end([[[10, 20, 30], [11, 21, 31]]])
    rounds().settle(behind, session, range(5), ())
    assert [node.token_id for node in session.nodes] == [10, 11, 20, 21]
    assert session.session.tree.num_nodes == 4
    assert session.nodes[0].logprob == -0.1


def test_rows_behind_the_step_that_the_host_has_to_draw_for_mean_nothing(engine: Engine) -> None:
    token_ids, rows, _ = settled(engine, rows_behind(0, 3, 1), [[10, 20, 30]], 7)
    assert (token_ids, rows) == ([10, 20], [0, 1, 4])


def test_of_a_draft_that_the_draft_model_could_not_make_the_last_token_s_row_is_left(engine: Engine) -> None:
    session = in_turns(engine)
    behind = RoundBehind(a_draft("0"), {session: rows_behind(0, 4, 2)})
    assert rounds().settle(behind, session, range(13), ()) == ([0], ())
    assert (session.nodes, session.rows) == ([], [0])


def test_tokens_that_the_target_does_not_have_are_no_nodes(engine: Engine) -> None:
    # The vocabulary has 1000.
    token_ids, rows, _ = settled(engine, rows_behind(0, 3, 2), [[10, 1000, 30], [1001, 21, 31], [12, 22, 32]], 10)
    assert (token_ids, rows) == ([10, 30, 21, 31], [0, 1, 5, 6, 7])


def test_what_the_draft_model_is_told_of_is_what_the_verdict_commits() -> None:
    rng = random.Random(5)
    num_beside = 0
    for _ in range(500):
        depth, width = rng.randrange(5), rng.randrange(NUM_BEST)
        rows = rows_behind(0, depth, width)
        # Of so few tokens many agree.
        found = [rng.sample(range(5), NUM_BEST) for _ in range(rng.randint(0, 5))]
        draws = [rng.randrange(5) for _ in range(1 + depth * (1 + width))]
        spec = SessionSpec("s", (1, 2), GREEDY, SpeculationParams(Method.BEST_FIRST, 8), 5, 100)
        session = Session(spec)
        nodes, picked = rows.settled(cast(Any, SimpleNamespace(session=session)), found)
        verdict = session.apply(nodes, [draws[row] for row in picked])
        assert rows.kept(found, draws) == list(verdict.token_ids)
        num_beside += any(picked[row] > depth for row in verdict.accepted_rows)
    assert num_beside > 50


class Told:
    """A draft model that is told what was kept."""

    def __init__(self, sessions: Sequence[VerifySession] = ()) -> None:
        """
        Args:
            sessions: Those whose committed tokens are counted whenever it is told.
        """
        self.kept: list[dict[int, list[int]]] = []
        self.num_committed: list[list[int]] = []
        self._sessions = sessions

    def commit(self, draft: PendingDraft, kept: Mapping[int, Sequence[int]]) -> None:
        self.kept.append({chain: list(token_ids) for chain, token_ids in kept.items()})
        self.num_committed.append([len(session.session.committed) for session in self._sessions])
        draft.has_gone_on()


def told_of(
    sessions: Sequence[VerifySession], draws: Sequence[int], *, ends: bool = True
) -> list[dict[int, list[int]]] | None:
    """What the draft model is told before the verdicts are made. None if they are waited for."""
    told = Told()
    draft = a_draft(*(session.session.spec.session_id for session in sessions), commit=told.commit)
    if ends:
        draft.end([[[10, 20, 30], [11, 21, 31]]] * len(sessions))
    behind = RoundBehind(draft, {session: rows_behind(number, 2, 1) for number, session in enumerate(sessions)})
    kept = behind.kept(dict.fromkeys(sessions, draws))
    if kept is None:
        return None
    behind.go_on(kept)
    return told.kept


def test_the_draft_model_hears_of_all_that_goes_on_at_once(engine: Engine) -> None:
    sessions = [in_turns(engine), in_turns(engine)]
    # The second token beside the chain, and what follows it.
    assert told_of(sessions, [10, 21, 0, 0, 5]) == [{0: [10, 21, 5], 1: [10, 21, 5]}]
    assert told_of(sessions, [10, 21, 0, 0, 5], ends=False) == [{0: [10], 1: [10]}]


def test_the_draft_model_does_not_go_on_with_texts_that_end(engine: Engine) -> None:
    going, stopped, full = (in_turns(engine) for _ in range(3))
    set_spec(stopped, stop_token_ids=frozenset({11}))
    set_spec(full, max_tokens=3)
    assert told_of([going, stopped, full], [10, 11, 5, 0, 0]) == [{0: [10, 11, 5]}]
    assert told_of([stopped, full], [10, 11, 5, 0, 0]) == []
    assert told_of([going, stopped, full], [10, 5, 0, 0, 0]) == [{0: [10, 5], 1: [10, 5], 2: [10, 5]}]


def test_the_draft_model_is_told_of_no_token_that_no_tree_takes(engine: Engine) -> None:
    sessions = [in_turns(engine), in_turns(engine)]
    set_spec(sessions[1], vocab_size=21)
    assert told_of(sessions, [10, 21, 0, 0, 5]) == [{0: [10, 21, 5]}]


def test_who_may_go_on_in_another_way_is_told_of_by_its_verdict(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, auto = in_turns(engine), in_turns(engine)
    monkeypatch.setattr(auto.choice, "is_auto", True)
    assert told_of([going, auto], [10, 5, 0, 0, 0]) is None


def test_where_a_text_may_be_cut_the_draft_model_waits_for_the_verdicts(engine: Engine) -> None:
    going, may_stop = in_turns(engine), in_turns(engine)
    cast(Any, may_stop.session)._endings.append(SimpleNamespace(take=lambda _: None))
    assert told_of([going, may_stop], [10, 5, 0, 0, 0]) is None


@pytest.fixture
def marks(engine: Engine, device: Asynchronous, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The places of each forward's rows among tokens that are on the device, or their token ids. The keys of every row
    are its number, from 1 on. The target draws 7 everywhere."""
    monkeypatch.setattr(engine, "works_on", True)
    asked: list[list[int]] = []
    runner = cast(Any, engine)._runner
    forward = runner.forward

    def marking(segments: list[Any], draws: object, drawn: object) -> Any:
        for segment in segments:
            asked.append(list(segment.token_ids))
            first, count = segment.cache.length, len(segment.token_ids)
            segment.cache.reserve(first + count)
            places = segment.cache.places(np.arange(first, first + count))
            for number, place in enumerate(places.tolist(), start=1):
                segment.cache.pool.data[:, :, :, place] = number
        return forward(segments, draws, drawn)

    monkeypatch.setattr(runner, "forward", marking)
    return asked


def keys_of(session: VerifySession) -> list[int]:
    """Numbers of the rows whose keys a session has behind those that it began with."""
    places = session.cache.places(np.arange(2, session.cache.length))
    found: list[int] = session.cache.pool.data[0, 0, 0, places, 0].int().tolist()
    return found


def follow(engine: Engine, draft: PendingDraft) -> list[VerifySession]:
    engine.follow(draft)
    engine.take_posted(0)
    work, wait_s = engine.plan(OPENED_AT)
    assert wait_s is None or not work
    return work


CHAINS: Found = [[[7, 8, 9], [5, 6, 7], [7, 8, 9]], [[7, 8, 9], [7, 8, 9], [7, 8, 9]]]
"""Of the first one the second token is wrong, and the last of those beside it right; the second one is right."""


def test_the_device_is_asked_before_the_draft_is_known_and_keeps_what_was_accepted(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    first, second = in_turns(engine), in_turns(engine)
    wait = partial(device.happened.append, "waits")
    draft = pending_draft([2, 2], CHAINS, [("0", 3), ("1", 3)], wait=wait)
    assert follow(engine, draft) == [first, second]
    assert device.happened == ["waits", "start", "forward", "stop"]
    flat = draft.tokens.token_ids.flatten().tolist()
    beside = [8, 9, 6, 7, 8, 9]
    assert [[flat[place] for place in rows] for rows in marks] == [
        [2, 7, 5, 7, *beside],
        [2, 7, 7, 7, 8, 9, 8, 9, 8, 9],
    ]
    assert draft.end(CHAINS)
    engine.step([first, second])
    assert list(first.session.committed[3:]) == [7, 7, 7]
    assert list(second.session.committed[3:]) == [7, 7, 7, 7]
    # The last token, the chain's first, and the second one of those beside the second; the whole chain.
    assert [keys_of(session) for session in (first, second)] == [[1, 2, 8], [1, 2, 3, 4]]
    assert [session.num_missing for session in (first, second)] == [1, 1]
    assert (first.rows, first.begins_early) == (None, False)


def told_in_a_round(
    engine: Engine, sessions: Sequence[VerifySession], meanwhile: Callable[[], object] = lambda: None
) -> Told:
    """Verifies two sessions behind a draft; returns what the draft model was told. `meanwhile` is called while the
    device is at it."""
    told = Told(sessions)
    draft = pending_draft([2, 2], CHAINS, [("0", 3), ("1", 3)], commit=told.commit)
    assert follow(engine, draft) == sessions
    meanwhile()
    draft.end(CHAINS)
    engine.step(list(sessions))
    return told


def test_the_draft_model_goes_on_before_the_verdicts_are_made(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    told = told_in_a_round(engine, [in_turns(engine), in_turns(engine)])
    assert told.kept == [{0: [7, 7, 7], 1: [7, 7, 7, 7]}]
    assert told.num_committed == [[3, 3]]


def test_where_that_is_known_by_the_verdicts_alone_it_goes_on_when_they_are_made(
    engine: Engine, device: Asynchronous, marks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [in_turns(engine), in_turns(engine)]
    monkeypatch.setattr(sessions[1].choice, "is_auto", True)
    monkeypatch.setattr(sessions[1].choice, "_chosen", lambda: sessions[1].choice.strategy)
    told = told_in_a_round(engine, sessions)
    assert told.kept == [{0: [7, 7, 7], 1: [7, 7, 7, 7]}]
    assert told.num_committed == [[6, 7]]


def test_where_a_verdict_ends_a_text_nobody_waits_for_the_draft_model(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    stopped, may_stop = in_turns(engine), in_turns(engine)
    set_spec(stopped, max_tokens=3)
    cast(Any, may_stop.session)._endings.append(SimpleNamespace(take=lambda _: None))
    assert told_in_a_round(engine, [stopped, may_stop]).kept == []
    assert len(may_stop.session.committed) == 7


def test_it_does_not_go_on_where_the_next_round_has_no_draft(
    engine: Engine, device: Asynchronous, marks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [in_turns(engine, retrieval=True, sources=(Source.POOL,)) for _ in range(2)]

    def skip(skipping: Sequence[VerifySession], *_: object) -> None:
        for session in skipping:
            session.skip_draft()

    monkeypatch.setattr(engine._draft_skips, "choose", skip)
    assert told_in_a_round(engine, sessions).kept == []
    assert [len(session.session.committed) for session in sessions] == [6, 7]


@pytest.mark.parametrize("chosen", [Strategy(Method.OFF), Strategy(Method.DOUBLE, Rows.CHAIN, retrieval=True)])
def test_it_does_not_go_on_by_the_strategy_before_where_a_session_has_chosen_another(
    engine: Engine, device: Asynchronous, marks: list[list[int]], monkeypatch: pytest.MonkeyPatch, chosen: Strategy
) -> None:
    sessions = [in_turns(engine), in_turns(engine)]
    monkeypatch.setattr(sessions[0].choice, "is_auto", True)
    monkeypatch.setattr(sessions[0].choice, "_chosen", lambda: chosen)
    assert told_in_a_round(engine, sessions).kept == []
    assert sessions[0].choice.strategy == chosen


def test_where_a_session_has_lost_its_drafter_the_others_hear_by_the_loop(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    sessions = [in_turns(engine), in_turns(engine)]
    cast(Any, sessions[0].session)._endings.append(SimpleNamespace(take=lambda _: None))

    def lose_one() -> None:
        engine.post("1", lambda each: each.detach(Peer.SPECULATOR, Absence.LOST))

    assert told_in_a_round(engine, sessions, meanwhile=lose_one).kept == []
    assert [len(session.session.committed) for session in sessions] == [6, 7]


def test_beside_a_chain_that_ends_early_the_rows_that_were_accepted_are_kept(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    session = in_turns(engine)
    draft = pending_draft([2], CHAINS[:1], [("0", 3)])
    work = follow(engine, draft)
    draft.end([CHAINS[0][:2]])  # the host has to draw the third token
    engine.step(work)
    assert list(session.session.committed[3:]) == [7, 7, 7]
    assert keys_of(session) == [1, 2, 8]


def test_a_draft_that_is_quicker_than_the_verdict_that_it_follows_is_taken_in_behind_it(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    session = in_turns(engine)
    draft = pending_draft([2], CHAINS[:1], [("0", 3)])
    work = follow(engine, draft)
    draft.end(CHAINS[:1])
    engine.post("0", lambda each: each.add_draft(Draft(6, 2, [0], [4], [], Source.DRAFT), OPENED_AT))
    engine.step(work)
    assert len(session.session.committed) == 6
    assert list(session.session.tree.root.children) == [4]


def test_a_session_that_leaves_while_its_round_runs_leaves_that_of_the_others_alone(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    first, second = in_turns(engine), in_turns(engine)
    draft = pending_draft([2, 2], CHAINS, [("0", 3), ("1", 3)])
    work = follow(engine, draft)
    engine.close("0")
    draft.end(CHAINS)
    engine.step(work)
    assert list(engine.sessions.values()) == [second]
    assert len(first.session.committed) == 3
    assert list(second.session.committed[3:]) == [7, 7, 7, 7]
    assert keys_of(second) == [1, 2, 3, 4]


def test_a_round_that_all_have_left_is_forgotten(engine: Engine, device: Asynchronous, marks: list[list[int]]) -> None:
    in_turns(engine)
    follow(engine, pending_draft([2], CHAINS[:1], [("0", 3)]))
    engine.remove("0")
    assert engine.plan(OPENED_AT) == ([], None)
    assert pool_of(engine).blocks.num_free == pool_of(engine).blocks.num_blocks


def test_a_draft_that_never_ends_makes_a_plain_round(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    session = in_turns(engine)
    engine.step(follow(engine, pending_draft([2], CHAINS[:1], [("0", 3)])))
    assert list(session.session.committed[3:]) == [7]
    assert keys_of(session) == [1]
    assert session.num_missing == 1


def test_a_draft_that_has_ended_is_told_of_and_verified_as_any_other(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    session = in_turns(engine)
    draft = pending_draft([2], CHAINS[:1], [("0", 3)])
    assert not draft.end(CHAINS[:1])
    assert follow(engine, draft) == []
    assert not device.happened
    session.add_draft(Draft(3, 1, [0, 1], [7, 7], [], Source.DRAFT), OPENED_AT)
    work, _ = engine.plan(OPENED_AT)
    engine.step(work)
    assert marks == [[2, 7, 7]]
    assert list(session.session.committed[3:]) == [7, 7, 7]
    assert keys_of(session) == [1, 2, 3]


def test_a_device_that_does_not_work_on_is_not_asked_behind_a_draft(
    engine: Engine, device: Asynchronous, marks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turns(engine)
    draft = pending_draft([2], CHAINS[:1], [("0", 3)])
    monkeypatch.setattr(engine, "works_on", False)
    assert follow(engine, draft) == []
    assert not marks
    assert not draft.end(CHAINS[:1])


def test_where_rows_may_not_branch_nothing_stands_beside_the_chain(engine: Engine) -> None:
    tree, chain = in_turns(engine), in_turns(engine, rows=Rows.CHAIN)
    behind = plan(a_draft("0", "1"), [tree, chain])
    assert behind is not None
    assert (behind.rows[tree].width, behind.rows[chain].width) == (NUM_BEST - 1, 0)


def test_where_the_pool_has_no_room_the_draft_is_told_of_and_verified_as_any_other(
    engine: Engine, device: Asynchronous, marks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = in_turns(engine), in_turns(engine)
    has_free_room = engine._planner._has_free_room
    monkeypatch.setattr(engine._planner, "_has_free_room", lambda cache, _: cache is first.cache)
    assert follow(engine, pending_draft([2, 2], CHAINS, [("0", 3), ("1", 3)])) == []
    assert not marks
    assert not any(session.begins_early for session in (first, second))
    monkeypatch.setattr(engine._planner, "_has_free_room", has_free_room)
    for session in (first, second):
        session.add_draft(Draft(3, 1, [0, 1], [7, 7], [], Source.DRAFT), OPENED_AT)
    work, _ = engine.plan(OPENED_AT)
    engine.step(work)
    assert marks == [[2, 7, 7]] * 2
    assert [list(session.session.committed[3:]) for session in (first, second)] == [[7, 7, 7]] * 2
    assert [keys_of(session) for session in (first, second)] == [[1, 2, 3]] * 2


def test_a_paused_session_is_not_verified_behind_a_draft(
    engine: Engine, device: Asynchronous, marks: list[list[int]]
) -> None:
    first, second = in_turns(engine), in_turns(engine)
    second.is_paused = True
    draft = pending_draft([2, 2], CHAINS, [("0", 3), ("1", 3)])
    assert follow(engine, draft) == []
    assert not marks
    assert follow(engine, pending_draft([2], CHAINS[:1], [("0", 3)])) == [first]
