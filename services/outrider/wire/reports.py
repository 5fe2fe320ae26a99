"""Reports of a generation next to its text, on the wire and in the domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.params import check
from outrider.core.reports import LogprobsMode, ReportParams, RoundReport, TokenLogprobs, VerifiedTree
from outrider.core.statistics import Statistics
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.convert import costs_to_proto, source_to_proto
from outrider.wire.speculation import METHODS_TO_PROTO, enum_from_proto, scalars_from_proto


def report_from_proto(message: verifier_pb2.ReportParams) -> ReportParams:
    """Returns the requested reports; unset fields have the defaults that the proto states."""
    field, mode = "report.logprobs_mode", message.logprobs_mode
    is_told = message.HasField("logprobs") or message.HasField("prompt_logprobs")
    check(is_told or not mode, field, "unset where no log-probabilities are asked for", mode)
    modes = verifier_pb2.LogprobsMode
    resolved = enum_from_proto(mode, LogprobsMode, modes, field, LogprobsMode.RAW_LOGPROBS)
    return ReportParams(**scalars_from_proto(message, ReportParams), logprobs_mode=resolved)


def logprobs_to_proto(logprobs: Iterable[TokenLogprobs]) -> list[verifier_pb2.TokenLogprobs]:
    """Converts log-probabilities, one message for each token."""
    return [
        verifier_pb2.TokenLogprobs(
            logprob=each.logprob,
            rank=each.rank,
            top_token_ids=[token_id for token_id, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def round_to_proto(report: RoundReport) -> verifier_pb2.RoundReport:
    """Converts what one round did."""
    times, draft_time = report.times, report.draft_time
    return verifier_pb2.RoundReport(
        method=METHODS_TO_PROTO[report.method],
        drafted_by_source=[
            types_pb2.SourceCount(source=source_to_proto(source), num_tokens=count)
            for source, count in sorted(report.drafted_by_source.items(), key=lambda item: item[0].value)
        ],
        num_accepted_tokens=report.num_accepted,
        num_forward_rows=report.num_forward_rows,
        times=verifier_pb2.RoundTimes(
            round_ms=times.round_ms,
            forward_ms=times.forward_ms,
            wait_ms=times.wait_ms,
            overhead_ms=times.overhead_ms,
            draft_latency_ms=draft_time.draft_latency_ms,
            draft_forward_ms=draft_time.draft_forward_ms,
            retrieval_ms=times.retrieval_ms,
            draft_retrieval_ms=draft_time.draft_retrieval_ms,
        ),
        tree=None if report.tree is None else _tree_to_proto(report.tree),
    )


def _tree_to_proto(tree: VerifiedTree) -> verifier_pb2.VerifiedTree:
    return verifier_pb2.VerifiedTree(
        parents=[parent + 1 for parent in tree.parents],
        token_ids=tree.token_ids,
        costs=costs_to_proto(tree.logprobs),
        sources=map(source_to_proto, tree.sources),
    )


def speculative_decoding_to_proto(
    statistics: Statistics, num_spec_tokens: int
) -> verifier_pb2.SpeculativeDecodingMetrics:
    """Sums the speculation of one generation up, under vLLM's names."""
    by_num_accepted = statistics.rounds_by_num_accepted
    num_steps = sum(by_num_accepted.values())
    num_accepted = sum(number * count for number, count in by_num_accepted.items())
    num_drafted = statistics.num_drafted_tokens
    return verifier_pb2.SpeculativeDecodingMetrics(
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 0.0,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        acceptance_histogram=_histogram(by_num_accepted),
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=num_spec_tokens,
    )


def _histogram(counts: dict[int, int]) -> Sequence[int]:
    return [counts.get(number, 0) for number in range(max(counts, default=-1) + 1)]
