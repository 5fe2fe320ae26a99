"""What a round's report says of the drafts that came for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.methods import PEARL
from outrider.core.params import SamplingParams, Source
from outrider.core.reports import ReportParams
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Absence, DraftTime, Peer
from outrider.core.tree import Draft
from outrider.rounds.timings import EngineTimings
from outrider.v1 import verifier_pb2
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.round import Forward
from outrider.verifier.session import VerifySession
from outrider.wire.reports import round_to_proto

PROMPT = (1, 2, 3)
NOTHING = DraftTime(0.0, 0.0, 0.0)


class Cache:
    """Slots without content."""

    length = len(PROMPT) - 1

    def keep(self, length: int, slots: list[int]) -> None:
        self.length = length + len(slots)

    def publish(self, token_ids: object) -> None: ...


class Rounds:
    """A session of PEARL whose rounds end when the test says so; times are in milliseconds."""

    def __init__(self, *, rounds: bool = True) -> None:
        params = SpeculationParams(PEARL, 4)
        spec = SessionSpec(
            "s", PROMPT, SamplingParams(temperature=0.0), params, 1000, 100, report=ReportParams(rounds=rounds)
        )
        timings, listener = EngineTimings(ForwardTimes({1: 10.0})), cast(Any, None)
        self.session = VerifySession(spec, listener, cast(Any, Cache()), timings, RoundCounts(), None, 0.0)
        self.num_nodes = 0

    def draft(self, num_commits: int, taken_in: float, arrived: float | None = None, forward_us: int = 3000) -> None:
        """Makes a guess come that knows this number of commits."""
        self.num_nodes += 1
        draft = Draft(len(PROMPT) + num_commits, self.num_nodes, [0], [99], [-0.1], Source.DRAFT, forward_us=forward_us)
        at = taken_in if arrived is None else arrived
        self.session.add_draft(draft, taken_in / 1e3, at / 1e3)

    def end(self, at: float) -> Verdict:
        """Ends a round, which commits one token."""
        self.session.round.nodes = []
        return self.session.settle([7], Forward((at - 10.0) / 1e3, at / 1e3, 10.0))

    def end_with_report(self, at: float) -> DraftTime:
        report = self.end(at).report
        assert report is not None
        return DraftTime(*(round(each, 6) for each in _times(report.draft_time)))


def _times(time: DraftTime) -> tuple[float, float, float]:
    return time.draft_latency_ms, time.draft_forward_ms, time.draft_retrieval_ms


def test_a_round_tells_how_long_the_draft_took_that_came_before_it_and_no_other_round_does() -> None:
    rounds = Rounds()
    rounds.draft(0, taken_in=5)  # answers the opening: no commit was sent
    assert rounds.end_with_report(at=20) == DraftTime(0.0, 3.0, 0.0)
    rounds.draft(1, taken_in=26)
    assert rounds.end_with_report(at=40) == DraftTime(6.0, 3.0, 0.0)
    assert rounds.end_with_report(at=60) == NOTHING


def test_an_answer_over_a_long_wire_belongs_to_the_round_that_uses_it() -> None:
    rounds = Rounds()
    for at in (20, 40, 60):
        assert rounds.end_with_report(at) == NOTHING
    rounds.draft(1, taken_in=63)  # the commit of 20 ms
    assert rounds.end_with_report(at=80) == DraftTime(43.0, 3.0, 0.0)
    rounds.draft(2, taken_in=84)
    assert rounds.end_with_report(at=100) == DraftTime(44.0, 3.0, 0.0)


def test_only_the_first_draft_answers_a_commit_and_all_forwards_count() -> None:
    rounds = Rounds()
    rounds.end(at=20)
    rounds.draft(1, taken_in=24)
    rounds.draft(1, taken_in=29)
    assert rounds.end_with_report(at=40) == DraftTime(4.0, 6.0, 0.0)


def test_a_draft_has_arrived_before_the_forward_ends_during_which_it_came() -> None:
    rounds = Rounds()
    rounds.end(at=20)
    rounds.end(at=40)
    rounds.draft(1, taken_in=40, arrived=27)
    assert rounds.end_with_report(at=60).draft_latency_ms == pytest.approx(7.0)


def test_what_a_lost_stream_was_asked_is_answered_by_nobody() -> None:
    rounds = Rounds()
    rounds.end(at=20)
    rounds.session.detach(Peer.SPECULATOR, Absence.LOST)
    rounds.session.attach()
    rounds.draft(1, taken_in=5000)
    assert rounds.end_with_report(at=5020) == DraftTime(0.0, 3.0, 0.0)


def test_nothing_is_measured_where_nobody_asks() -> None:
    rounds = Rounds(rounds=False)
    rounds.draft(0, taken_in=5)
    assert rounds.end(at=20).report is None
    assert rounds.session.reports.drafts is None


def test_the_times_of_drafts_cross_the_wire() -> None:
    rounds = Rounds()
    rounds.end(at=20)
    rounds.draft(1, taken_in=26)
    report = rounds.end(at=40).report
    assert report is not None
    times: verifier_pb2.RoundTimes = round_to_proto(report).times
    assert times.draft_latency_ms == pytest.approx(6.0)
    assert times.draft_forward_ms == pytest.approx(3.0)
