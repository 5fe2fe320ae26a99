"""The counts of a verifier, and their names in Prometheus.

`outrider_spec_decode_*` mean what vLLM's metrics of these names mean; a draft is what a round verifies. What schedulers
read of a replica has vLLM's names, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.blocks import PoolState
from outrider.core.methods import METHODS
from outrider.core.params import Source
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import Method
from outrider.core.statistics import COUNTS, Counts, Histogram, RoundTime, Statistics, Traffic
from outrider.peers.channel import PeerState, read_peers
from outrider.telemetry.generation_metrics import GenerationCalls, read_calls
from outrider.telemetry.metrics import HistogramMetric, Metrics, counter, counters, gauges
from outrider.verifier.round import EmptyRoundReason

SHARE_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Bounds of the times of a round's parts."""
GAP_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Bounds of the times between two forwards."""


@dataclass(slots=True)
class SessionCounts:
    """Counts since the start that the event loop writes; another thread may read."""

    # All keys from the start: another thread may iterate while this one counts.
    sessions: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(METHODS.values(), 0))
    """Sessions that have begun, by their method."""
    num_resumed: int = 0
    """Sessions that resume an interrupted text."""
    num_degraded: int = 0
    """Ended sessions that have lacked a peer of their method for a part of their time."""
    acceptance_rates: Histogram = field(default_factory=lambda: Histogram(SHARE_BOUNDS))
    """Share of drafted tokens that were accepted, for each ended session that had any."""
    caller_traffic: Traffic = field(default_factory=Traffic)
    """Bytes between this verifier and callers that bring their own drafts."""

    def begin(self, spec: SessionSpec) -> None:
        """Counts a session that begins."""
        self.sessions[spec.speculation.method] += 1
        self.num_resumed += bool(spec.resume_token_ids)

    def end(self, statistics: Statistics) -> None:
        """Counts a session that has come to its end."""
        self.num_degraded += statistics.degraded
        if statistics.num_drafted_tokens:
            self.acceptance_rates.add(statistics.num_accepted_tokens / statistics.num_drafted_tokens)


@dataclass(slots=True)
class RoundCounts(Counts):
    """Counts since the start that the engine's thread writes: the totals of all summaries, and what no summary shows.

    Other threads may read, and see numbers of about the same time.
    """

    forwards: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Durations in seconds of the target's forwards that ended a round."""
    gaps: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    """Seconds from the draws of a forward until the next forward was launched, if only this process was waited for: a
    GPU is idle meanwhile. 0 if it was launched before the draws."""
    num_rows: int = 0
    """Rows of these forwards, those of prompts included."""
    rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(METHODS.values(), 0))
    """Rounds by the method in use; a round of `auto` by what it chose."""
    auto_rounds: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(METHODS.values(), 0))
    """Rounds of `auto` by what it chose."""
    empty_rounds: dict[EmptyRoundReason, int] = field(default_factory=lambda: dict.fromkeys(EmptyRoundReason, 0))
    """Rounds that verified nothing though their method would have."""
    num_prompt_tokens: int = 0
    """Tokens of prompts that are processed."""
    num_generated_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=lambda: [0])
    """Rounds that verified a draft, by the number of its tokens that were kept."""
    waits: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Seconds of waiting of the rounds that waited for a draft or a continuation."""
    draft_latencies: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Seconds from a commit that left nothing to verify (in turns: any commit) to the first draft that answers it."""
    prefill_s: float = 0.0
    """Time of the first rounds of all sessions, from their opening on."""
    forward_s: float = 0.0
    """Time of all later rounds that went to forwards, which sessions share."""
    wait_s: float = 0.0
    retrieval_s: float = 0.0
    overhead_s: float = 0.0

    def add_forward(self, forward_ms: float, num_rows: int) -> None:
        """Counts a forward that ended a round."""
        self.forwards.add(forward_ms / 1e3)
        self.num_rows += num_rows

    def add_round(
        self,
        spec: SessionSpec,
        method: Method,
        verdict: Verdict,
        empty_reason: EmptyRoundReason | None,
        *,
        is_first: bool,
    ) -> None:
        """Counts a verdict.

        Args:
            spec: The request.
            method: The method of the round.
            verdict: Its outcome.
            empty_reason: The reason why it verified nothing. None means that it did, or that nothing was wanted.
            is_first: True for the first one of its session.
        """
        self.rounds[method] += 1
        if spec.speculation.method.is_auto:
            self.auto_rounds[method] += 1
        if empty_reason is not None:
            self.empty_rounds[empty_reason] += 1
        self.num_generated_tokens += len(verdict.token_ids)
        if is_first:
            self.num_prompt_tokens += len(spec.prompt_token_ids)
        if not verdict.num_drafted:
            return
        # Tokens at and after a stop are not kept.
        num_kept = min(verdict.num_accepted, len(verdict.sources))
        while len(self.accepted_lengths) <= num_kept:
            self.accepted_lengths.append(0)
        self.accepted_lengths[num_kept] += 1

    def add_times(self, times: RoundTime, *, is_first: bool, has_waited: bool) -> None:
        """Adds up where the time of a round went; a session's first round counts as time for the prompt."""
        if has_waited:
            self.waits.add(times.wait_ms / 1e3)
        if is_first:
            self.prefill_s += times.round_ms / 1e3
            return
        self.forward_s += times.forward_ms / 1e3
        self.wait_s += times.wait_ms / 1e3
        self.retrieval_s += times.retrieval_ms / 1e3
        # `RoundTime` counts lookups in process as overhead; here they are a phase of their own.
        self.overhead_s += max(0.0, times.overhead_ms - times.retrieval_ms) / 1e3


def read_sessions(calls: GenerationCalls, counts: SessionCounts, peers: list[PeerState]) -> Metrics:
    """Yields what the event loop has counted. May be called in any thread, as all functions here."""
    yield from read_calls(calls, "outrider_")
    yield counters(
        "outrider_sessions_total",
        "Generations that were admitted, by method.",
        "method",
        {method.name: count for method, count in counts.sessions.items()},
    )
    yield counter("outrider_resumed_sessions_total", "Those that went on with an interrupted text.", counts.num_resumed)
    yield counter(
        "outrider_degraded_sessions_total",
        "Generations that came to their end and for part of which a peer was missing that their method needs.",
        counts.num_degraded,
    )
    yield HistogramMetric(
        "outrider_request_acceptance_rate",
        "Accepted of the drafted tokens, of each generation that came to its end and had any.",
        counts.acceptance_rates,
    )
    yield from read_peers(peers, {"caller": counts.caller_traffic})


def read_load(calls: GenerationCalls, pool: PoolState, model_id: str) -> Metrics:
    """Yields what the endpoint picker of the Gateway API's inference extension, and dashboards of vLLM, read of a
    replica: names and label are vLLM's."""
    num_blocks = sum(pool.num_blocks.values())
    numbers = {
        "vllm:num_requests_running": ("Requests that generate now.", calls.num_running),
        "vllm:num_requests_waiting": ("Requests that wait for their turn now.", calls.num_waiting),
        # Cached prefixes that nobody holds make room at once.
        "vllm:kv_cache_usage_perc": (
            "Share of the blocks of keys and values that sessions hold, 0 to 1.",
            pool.num_blocks["held"] / num_blocks if num_blocks else 0.0,
        ),
    }
    for name, (description, value) in numbers.items():
        yield gauges(name, description, "model_name", {model_id: value})


def read_rounds(counts: RoundCounts, max_chain_len: int) -> Metrics:
    """Yields what the engine has counted. `max_chain_len` is that of any session."""
    yield counter("outrider_prompt_tokens_total", "Tokens of prompts that were processed.", counts.num_prompt_tokens)
    yield counter("outrider_generation_tokens_total", "Tokens that were generated.", counts.num_generated_tokens)
    yield HistogramMetric(
        "outrider_verify_duration_seconds",
        "A forward of the target, for all sessions that had a round then.",
        counts.forwards,
    )
    yield HistogramMetric(
        "outrider_verify_gap_seconds",
        "From the draws of a forward until the next one was asked for, where neither drafts nor requests were waited "
        "for: the host's share, in which a GPU has nothing to do. 0 where it was asked for ahead.",
        counts.gaps,
    )
    yield counter("outrider_verify_rows_total", "Rows of these forwards, those of prompts included.", counts.num_rows)
    for name, info in COUNTS.items():
        if info.metric:
            yield counter(info.metric, info.description, getattr(counts, name))
    yield from _read_drafts(counts, max_chain_len)
    yield from _read_methods(counts)
    yield from _read_times(counts)


def _read_drafts(counts: RoundCounts, max_chain_len: int) -> Metrics:
    lengths = list(counts.accepted_lengths)  # a copy: the engine's thread may append meanwhile
    # Positions that no draft has reached are exported as 0: `rate` would not see the first increase of a new series.
    at_position = [*num_accepted_at(lengths), *[0] * (max_chain_len + 1 - len(lengths))]
    yield counter("outrider_spec_decode_num_drafts_total", "Rounds that verified a draft.", sum(lengths))
    yield counters(
        "outrider_spec_decode_num_accepted_tokens_per_pos_total",
        "Drafted tokens that were accepted, by their place in the draft, the first being 0.",
        "position",
        {str(position): count for position, count in enumerate(at_position)},
    )
    yield counters(
        "outrider_accepted_tokens_total",
        "Drafted tokens that were accepted, by where they came from.",
        "source",
        {source.name.lower(): counts.accepted_by_source[source] for source in Source if source is not Source.TARGET},
    )


def num_accepted_at(accepted_lengths: Sequence[int]) -> list[int]:
    """Returns for each position, from the first on, the drafts of which at least so many tokens were kept.

    Args:
        accepted_lengths: Drafts by the number of their tokens that were kept.
    """
    counts, so_far = [], 0
    for count in reversed(accepted_lengths[1:]):
        so_far += count
        counts.append(so_far)
    return counts[::-1]


def _read_methods(counts: RoundCounts) -> Metrics:
    yield counters(
        "outrider_rounds_total",
        "Rounds, by the method in use: a round of method auto by what it chose.",
        "method",
        {method.name: count for method, count in counts.rounds.items()},
    )
    yield counters(
        "outrider_auto_rounds_total",
        "Rounds of method auto, by what it chose.",
        "method",
        {method.name: count for method, count in counts.auto_rounds.items()},
    )
    yield counters(
        "outrider_fallback_rounds_total",
        "Rounds that verified nothing though their method would have, by why.",
        "reason",
        {reason.value: count for reason, count in counts.empty_rounds.items()},
    )


def _read_times(counts: RoundCounts) -> Metrics:
    yield counters(
        "outrider_round_seconds_total",
        "Time of the rounds of all sessions, by what it went to; the first round of each is all prefill.",
        "phase",
        {
            "prefill": counts.prefill_s,
            "forward": counts.forward_s,
            "wait": counts.wait_s,
            "retrieval": counts.retrieval_s,
            "overhead": counts.overhead_s,
        },
    )
    yield HistogramMetric(
        "outrider_draft_wait_seconds",
        "How long the rounds that waited for a draft or a continuation did so.",
        counts.waits,
    )
    yield HistogramMetric(
        "outrider_draft_latency_seconds",
        "From a commit that left nothing to verify, or in turns any commit, to the first draft that answers it.",
        counts.draft_latencies,
    )
