"""The verifier's counts under the names that Prometheus knows. `outrider_spec_decode_*` mean what vLLM's metrics of
these names mean, where a draft is what a round verifies."""

from __future__ import annotations

from outrider.core.params import Source
from outrider.core.statistics import COUNTS
from outrider.peers.channel import PeerState, read_peers
from outrider.telemetry.generation_metrics import GenerationCalls, read_calls
from outrider.telemetry.metrics import HistogramMetric, Metrics, counter, counters, gauge
from outrider.verifier.engine import Engine
from outrider.verifier.measurements import RoundCounts, SessionCounts, num_accepted_at

PREFIX = "outrider_"


def read_sessions(calls: GenerationCalls, counts: SessionCounts, states: list[PeerState]) -> Metrics:
    """What the event loop knows, `states` of the peers. Safe to call in any thread, as all of these."""
    yield from read_calls(calls, PREFIX)
    yield counters(
        "outrider_sessions_total",
        "Generations that were admitted, by method.",
        "method",
        {method.value: count for method, count in counts.sessions.items()},
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
    yield from read_peers(states, {"caller": counts.caller_traffic})


def read_engine(engine: Engine, max_chain_len: int) -> Metrics:
    """What the engine knows, once it is there. `max_chain_len` is that of any session."""
    counts = engine.counts
    num_slots, num_bytes = engine.kv_cache_use
    yield counter("outrider_prompt_tokens_total", "Tokens of prompts that were processed.", counts.num_prompt_tokens)
    yield counter("outrider_generation_tokens_total", "Tokens that were generated.", counts.num_generated_tokens)
    yield gauge("outrider_kv_cache_tokens", "Tokens whose keys and values are held, of all sessions.", num_slots)
    yield gauge("outrider_kv_cache_bytes", "Memory held for keys and values, of all sessions.", num_bytes)
    yield HistogramMetric(
        "outrider_verify_duration_seconds",
        "A forward of the target, for all sessions that had a round then.",
        counts.forwards,
    )
    yield counter("outrider_verify_rows_total", "Rows of these forwards, those of prompts included.", counts.num_rows)
    for name, info in COUNTS.items():
        if info.metric:
            yield counter(info.metric, info.description, getattr(counts, name))
    yield from _drafts(counts, max_chain_len)
    yield from _rounds(counts)
    yield from _waiting(counts)


def _drafts(counts: RoundCounts, max_chain_len: int) -> Metrics:
    lengths = list(counts.accepted_lengths)
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


def _rounds(counts: RoundCounts) -> Metrics:
    yield counters(
        "outrider_rounds_total",
        "Rounds, by the method in use: a round of method auto by what it chose.",
        "method",
        {method.value: count for method, count in counts.rounds.items()},
    )
    yield counters(
        "outrider_auto_rounds_total",
        "Rounds of method auto, by what it chose.",
        "method",
        {method.value: count for method, count in counts.auto_rounds.items()},
    )
    yield counters(
        "outrider_fallback_rounds_total",
        "Rounds that verified nothing though their method would have, by why.",
        "reason",
        {reason.value: count for reason, count in counts.fallback_rounds.items()},
    )
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


def _waiting(counts: RoundCounts) -> Metrics:
    yield HistogramMetric(
        "outrider_draft_wait_seconds",
        "How long the rounds that waited for a draft or a continuation did so.",
        counts.waits,
    )
    yield HistogramMetric(
        "outrider_draft_latency_seconds",
        "From a commit that left nothing to verify to the first draft that answers it.",
        counts.draft_latencies,
    )
