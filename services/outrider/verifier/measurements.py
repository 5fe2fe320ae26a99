"""What a verifier measures over all its sessions: times of rounds and peers, and the counts that metrics read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.core.auto.history import StrategyHistory
from outrider.core.calibration import RetrievalCalibration
from outrider.core.costs import ForwardTimes
from outrider.core.params import Method
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Counts, Histogram, RoundTime, RunningMean, Statistics, Traffic


class EmptyRoundReason(Enum):
    """The reasons. The values are those of the metrics."""

    LOAD = "load"
    """Sessions share the rows of a forward, and none were left for drafts."""
    DRAFT_DOWN = "draft_down"
    """The speculator, or the caller that drafts, is gone."""
    NO_MATCH = "no_match"
    """The method only retrieves, and nothing was found."""
    DRAFT_PENDING = "draft_pending"
    """The drafter is there, and its first draft has not come: it reads the prompt."""
    NO_DRAFT = "no_draft"
    """The drafter has answered, with nothing that fits."""
    NOT_AWAITED = "not_awaited"
    """No draft was there, and waiting for one was worth nothing."""
    DRAFT_TIMEOUT = "draft_timeout"
    """A draft was waited for, for as long as it was worth, and has not come."""


SHARE_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Bounds of the times of a round's parts."""


@dataclass(slots=True)
class RoundCounts(Counts):
    """Counts since the start: the totals of all sessions, and what no summary shows.

    The engine's thread writes; others may read, and see numbers of about the same time.
    """

    forwards: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Target forwards that a round came of, in seconds."""
    num_rows: int = 0
    """Rows of these forwards, those of prompts included."""
    rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(Method, 0))
    """By the method in use; a round of `Method.AUTO` by what it chose."""
    auto_rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(Method, 0))
    """What `Method.AUTO` chose."""
    fallback_rounds: dict[EmptyRoundReason, int] = field(default_factory=lambda: dict.fromkeys(EmptyRoundReason, 0))
    num_prompt_tokens: int = 0
    """Of prompts that are processed."""
    num_generated_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=lambda: [0])
    """Rounds that verified a draft, by how many of its tokens were kept."""
    waits: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Of the rounds that waited for a draft or a continuation, how long, in seconds."""
    draft_latencies: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """From a commit that left nothing to verify to the first draft that answers it, in seconds."""
    prefill_s: float = 0.0
    """Time of the first rounds of all sessions, from their opening on."""
    forward_s: float = 0.0
    """Of all later rounds: what went to forwards, which sessions share; likewise the following."""
    wait_s: float = 0.0
    retrieval_s: float = 0.0
    overhead_s: float = 0.0

    def add_round(self, spec: SessionSpec, method: Method, verdict: Verdict, fallback: EmptyRoundReason | None) -> None:
        """A verdict, of a round that went by `method`. `fallback`: why nothing was verified, if something should."""
        self.rounds[method] += 1
        if spec.speculation.method is Method.AUTO:
            self.auto_rounds[method] += 1
        if fallback is not None:
            self.fallback_rounds[fallback] += 1
        self.num_generated_tokens += len(verdict.token_ids)
        if verdict.base_len == len(spec.prompt_token_ids) + len(spec.resume_token_ids):
            self.num_prompt_tokens += len(spec.prompt_token_ids)
        if not verdict.num_drafted:
            return
        # Tokens at and behind a stop are not kept.
        num_kept = min(verdict.num_accepted, len(verdict.sources))
        while len(self.accepted_lengths) <= num_kept:
            self.accepted_lengths.append(0)
        self.accepted_lengths[num_kept] += 1

    def add_times(self, times: RoundTime, *, is_first: bool, has_waited: bool) -> None:
        """Where the time of a round went; all of the first one went to the prompt."""
        if has_waited:
            self.waits.add(times.wait_ms / 1e3)
        if is_first:
            self.prefill_s += times.round_ms / 1e3
            return
        self.forward_s += times.forward_ms / 1e3
        self.wait_s += times.wait_ms / 1e3
        self.retrieval_s += times.retrieval_ms / 1e3
        self.overhead_s += max(0.0, times.overhead_ms - times.retrieval_ms) / 1e3


@dataclass(slots=True)
class SessionCounts:
    """Since the start. Written by the event loop; another thread may read."""

    sessions: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(Method, 0))
    """Sessions that have begun, by the method that they go by."""
    num_resumed: int = 0
    """Those of them that go on with a text that was interrupted."""
    num_degraded: int = 0
    """Sessions that have ended, and for part of which a peer that their method needs was missing."""
    acceptance_rates: Histogram = field(default_factory=lambda: Histogram(SHARE_BOUNDS))
    """Of the sessions that have ended and in which something was drafted."""
    caller_traffic: Traffic = field(default_factory=Traffic)
    """Between callers that bring their own drafts and this verifier, towards them = sent."""

    def begin(self, spec: SessionSpec) -> None:
        """A session begins."""
        self.sessions[spec.speculation.method] += 1
        self.num_resumed += bool(spec.resume_token_ids)

    def end(self, statistics: Statistics) -> None:
        """A session has come to its end."""
        self.num_degraded += statistics.degraded
        if statistics.num_drafted_tokens:
            self.acceptance_rates.add(statistics.num_accepted_tokens / statistics.num_drafted_tokens)


def num_accepted_at(accepted_lengths: Sequence[int]) -> list[int]:
    """How many drafts were kept up to each position at least, from the first position on.

    Args:
        accepted_lengths: Drafts by how many of their tokens were kept.
    """
    counts, so_far = [], 0
    for count in reversed(accepted_lengths[1:]):
        so_far += count
        counts.append(so_far)
    return counts[::-1]


class EngineTimings:
    """Owned by the engine's thread."""

    def __init__(self, forward_times: ForwardTimes, max_num_rows: int = 32) -> None:
        self.max_num_rows = max_num_rows
        """Most drafted rows of a sub-tree whose size nobody has asked for."""
        self.forward_times = forward_times
        """As measured when the server started."""
        self.forward_ms = RunningMean()
        self.forward_ms.add(forward_times.of(1))
        self.overhead_ms = RunningMean(0.05)
        """Of a round: all but the forward and the waiting."""
        self.speculator_ms = RunningMean()
        """From a commit that leaves nothing to verify to the speculator's first answer."""
        self.draft_forward_ms = RunningMean()
        """What the draft model's forwards took of that."""
        self.datastore_ms = RunningMean()
        """From a commit to the datastore's answer."""
        self.answer_value = RunningMean(0.1)
        """Tokens of its answer that the target says."""
        self.retrieval = RetrievalCalibration()
        self.counts = RoundCounts()
        self.num_sessions = 0
        """Sessions that share the forwards now."""
        self._num_opened = 0
        self.experience = StrategyHistory(self.plain_ms)
        """Of `Method.AUTO`."""

    def number_session(self) -> int:
        """Sessions are numbered."""
        self._num_opened += 1
        return self._num_opened

    def set_num_sessions(self, count: int) -> None:
        """So many sessions share the forwards from here on."""
        self.num_sessions = count
        self.experience.plain_ms = self.plain_ms

    @property
    def plain_ms(self) -> float:
        """A round that verifies nothing."""
        return self.forward_times.of(max(1, self.num_sessions)) + self.overhead_ms.get(0.5)
