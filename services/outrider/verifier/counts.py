"""What the verifier counts for Prometheus, over all sessions: its engine round by round, its event loop session by
session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.distribution import Distribution
from outrider.core.params import Method, Source
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import RoundTime, Statistics, Traffic
from outrider.verifier.fallback import Fallback

SHARE_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Bounds of the times of a round's parts."""


@dataclass(slots=True)
class RoundCounts:
    """Since the start. Written by the engine's thread; others may read, and see numbers of about the same time."""

    forwards: Distribution = field(default_factory=lambda: Distribution(STEP_BOUNDS_S))
    """Target forwards that a round came of, in seconds."""
    num_rows: int = 0
    """Rows of these forwards, those of prompts included."""
    rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(Method, 0))
    """By the method in use; a round of `Method.AUTO` by what it chose."""
    auto_rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(Method, 0))
    """What `Method.AUTO` chose."""
    fallback_rounds: dict[Fallback, int] = field(default_factory=lambda: dict.fromkeys(Fallback, 0))
    num_hits: int = 0
    """Rounds after which the tree had the committed next token as a node."""
    num_prompt_tokens: int = 0
    """Of prompts that are processed."""
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Drafted tokens that were verified."""
    accepted_lengths: list[int] = field(default_factory=lambda: [0])
    """Rounds that verified a draft, by how many of its tokens were kept."""
    accepted_by_source: dict[Source, int] = field(
        default_factory=lambda: {source: 0 for source in Source if source is not Source.TARGET}
    )
    waits: Distribution = field(default_factory=lambda: Distribution(STEP_BOUNDS_S))
    """Of the rounds that waited for a draft or a continuation, how long, in seconds."""
    draft_latencies: Distribution = field(default_factory=lambda: Distribution(STEP_BOUNDS_S))
    """From a commit that left nothing to verify to the first draft that answers it, in seconds."""
    num_speculator_losses: int = 0
    prefill_s: float = 0.0
    """Time of the first rounds of all sessions, from their opening on."""
    forward_s: float = 0.0
    """Of all later rounds: what went to forwards, which sessions share; likewise the following."""
    wait_s: float = 0.0
    retrieval_s: float = 0.0
    overhead_s: float = 0.0

    def add_round(
        self, spec: SessionSpec, method: Method, verdict: Verdict, fallback: Fallback | None, *, is_hit: bool
    ) -> None:
        """A verdict, of a round that went by `method`. `fallback`: why nothing was verified, if something should."""
        self.rounds[method] += 1
        if spec.speculation.method is Method.AUTO:
            self.auto_rounds[method] += 1
        if fallback is not None:
            self.fallback_rounds[fallback] += 1
        self.num_hits += is_hit
        self.num_generated_tokens += len(verdict.token_ids)
        if verdict.base_len == len(spec.prompt_token_ids) + len(spec.resume_token_ids):
            self.num_prompt_tokens += len(spec.prompt_token_ids)
        if not verdict.num_drafted:
            return
        self.num_draft_tokens += verdict.num_drafted
        # Tokens at and behind a stop are not kept.
        num_kept = min(verdict.num_accepted, len(verdict.sources))
        while len(self.accepted_lengths) <= num_kept:
            self.accepted_lengths.append(0)
        self.accepted_lengths[num_kept] += 1
        for source in verdict.sources[:num_kept]:
            self.accepted_by_source[source] += 1

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
    acceptance_rates: Distribution = field(default_factory=lambda: Distribution(SHARE_BOUNDS))
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
