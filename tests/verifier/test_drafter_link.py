"""The states of a session's drafter, under any order of events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.costs import ForwardTimes
from outrider.core.methods import AUTO, PEARL, RETRIEVAL, SPECULATIVE
from outrider.core.params import SamplingParams, Source
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft
from outrider.rounds.drafter_link import DrafterLink, Link
from outrider.rounds.timings import EngineTimings
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.round import Forward
from outrider.verifier.session import VerifySession

PROMPT = (1, 2, 3)
STRATEGIES = (Strategy(PEARL), Strategy(SPECULATIVE), Strategy(RETRIEVAL), PLAIN)
EVENTS = st.lists(
    st.one_of(
        st.sampled_from(["attach", "detach", "commit"]),
        st.sampled_from(STRATEGIES),
        # A draft: the committed tokens that it does not know, and whether it is right.
        st.tuples(st.integers(0, 3), st.booleans()),
    ),
    max_size=40,
)


def spec_of(method: Method, *, shares_gpu: bool = False) -> SessionSpec:
    params = SpeculationParams(method, 8, retrieval=False)
    return SessionSpec("s", PROMPT, SamplingParams(temperature=0.0), params, 1000, 1000, shares_gpu=shares_gpu)


def draft_after(base_len: int, token_id: int, node_id: int) -> Draft:
    return Draft(base_len, node_id, [0], [token_id], [-0.1], Source.DRAFT)


class Life:
    """A link, and its expected state and answers."""

    def __init__(self, *, has_drafter: bool, shares_gpu: bool) -> None:
        self.generation = Session(spec_of(AUTO, shares_gpu=shares_gpu))
        self.strategy = STRATEGIES[0]
        self.link = DrafterLink(
            self.generation,
            self.strategy,
            EngineTimings(ForwardTimes({1: 10.0})),
            has_drafter=has_drafter,
            is_probing=False,
        )
        self.has_drafter = self.is_attached = has_drafter
        self.has_answered = self.was_there = False
        self.needed_from = len(PROMPT)
        self.asked: dict[int, float] = {}
        self.now, self.num_nodes, self.num_losses = 0.0, 0, 0

    @property
    def wants_drafts(self) -> bool:
        return self.strategy.method.has_draft_model

    @property
    def state(self) -> Link:
        if not self.has_drafter:
            return Link.ABSENT
        if not self.is_attached:
            return Link.LOST
        if not self.wants_drafts:
            return Link.PAUSED
        return Link.LIVE if self.has_answered else Link.PENDING

    def take(self, event: Any) -> None:
        self.now += 1.0
        match event:
            case "attach":
                self.link.attach()
                self.is_attached, self.has_answered, self.needed_from, self.was_there = True, False, 0, True
                self.asked.clear()
            case "detach":
                self.link.detach(Peer.SPECULATOR, Absence.LOST)
                self.is_attached = False
                self.num_losses += self.was_there
            case "commit":
                self.generation.apply([], [7])
                self.link.time_answer(self.now)
                if self.state is Link.LIVE and (self.link.takes_turns or not self.generation.tree.root.children):
                    self.asked[len(self.generation.committed)] = self.now
            case Strategy():
                if event.method.has_draft_model and not self.wants_drafts:
                    self.has_answered = False
                    self.needed_from = len(self.generation.committed)
                self.strategy = event
                self.link.follow(event)
            case num_unknown, is_right:
                self.add_draft(max(0, len(self.generation.committed) - num_unknown), 7 if is_right else 8)

    def add_draft(self, base_len: int, token_id: int) -> None:
        self.num_nodes += 1
        time = self.link.add_draft(draft_after(base_len, token_id, self.num_nodes), self.now, self.now)
        self.was_there = True
        self.has_answered |= self.is_attached and self.wants_drafts and base_len >= self.needed_from
        asked_at = self.asked.get(base_len)
        assert (None if time is None else time.draft_latency_ms) == (asked_at and (self.now - asked_at) * 1e3)
        self.asked = {each: at for each, at in self.asked.items() if each > base_len}


@given(EVENTS, st.booleans(), st.booleans())
def test_no_order_of_events_leads_to_another_state(events: list[Any], has_drafter: bool, shares_gpu: bool) -> None:
    life = Life(has_drafter=has_drafter, shares_gpu=shares_gpu)
    for event in events:
        life.take(event)
        link = life.link
        if not has_drafter and event == "attach":
            return  # a session without a drafter gets none attached
        assert link.state is life.state
        assert link.is_drafting == (link.state in (Link.PENDING, Link.LIVE))
        assert link.state is Link.LIVE or not link.takes_turns
        assert link.is_attached or link.next_steering() is None
        assert life.generation.statistics.num_speculator_losses == life.num_losses


@given(EVENTS, st.sampled_from([PEARL, SPECULATIVE]), st.booleans())
def test_a_round_waits_only_for_a_drafter_that_may_still_answer(
    events: list[Any], method: Method, has_drafter: bool
) -> None:
    cache = SimpleNamespace(length=len(PROMPT) - 1, keep=lambda *_: None, publish=lambda *_: None)
    timings, counts = EngineTimings(ForwardTimes({1: 10.0})), RoundCounts()
    session = VerifySession(
        spec_of(method), cast(Any, None), cast(Any, cache), timings, counts, None, 0.0, has_drafter=has_drafter
    )
    for now, event in enumerate(events):
        match event:
            case "attach" if has_drafter:
                session.attach()
            case "detach":
                session.detach(Peer.SPECULATOR, Absence.LOST)
            case "commit":
                session.settle([7], Forward(now, now, 10.0))
            case num_unknown, is_right:
                base_len = max(0, len(session.generation.committed) - num_unknown)
                session.add_draft(draft_after(base_len, 7 if is_right else 8, 1 + now), now)
        assert session.drafter.is_drafting or session.round.patience_ms == 0


def test_the_first_draft_of_a_stream_is_not_timed() -> None:
    life = Life(has_drafter=True, shares_gpu=False)
    for event in ("attach", "commit", (0, False)):
        life.take(event)  # no time is expected
    assert life.link.state is Link.LIVE
    assert not life.generation.statistics.draft_times
    for event in ("commit", (0, False)):
        life.take(event)
    assert [each.draft_latency_ms for each in life.generation.statistics.draft_times] == [1000.0]


def test_a_draft_that_was_on_its_way_during_a_pause_answers_nothing() -> None:
    life = Life(has_drafter=True, shares_gpu=False)
    for event in ("attach", PLAIN, "commit", STRATEGIES[0], (1, True)):
        life.take(event)
    assert life.link.state is Link.PENDING
    life.take((0, True))
    assert life.link.state is Link.LIVE


def test_a_slow_drafter_begins_with_a_pause_only_where_drafts_are_tried() -> None:
    generation, timings = Session(spec_of(AUTO)), EngineTimings(ForwardTimes({1: 10.0}))
    for is_probing in (True, False):
        link = DrafterLink(generation, STRATEGIES[0], timings, has_drafter=True, is_probing=is_probing)
        assert not link.attach(forward_us=30_000)
        assert link.attach(forward_us=50_000) == is_probing
