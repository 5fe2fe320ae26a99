"""Converts protobuf messages to core types and back. `outrider.wire.speculation` has the parameters of speculation.

`*_from_proto` raise InvalidParameter naming the field as the wire calls it; nothing is clipped and nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from outrider.core.auto.strategies import Decision
from outrider.core.params import Source, check
from outrider.core.session import FinishReason
from outrider.core.speculation import Method
from outrider.core.statistics import COUNTS, Absence, Peer, RoundTime, Statistics, Traffic, median_or_zero
from outrider.core.tree import Draft, SparseRow
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.speculation import METHODS_TO_PROTO

PROTOCOL_VERSION = 1

COST_PER_NAT = 32
"""Steps of a cost per nat. A varint of one byte holds costs below 128: tokens of a probability of 2 % and more."""
MAX_COST = 1023
"""Largest cost, about 32 nats; a varint of two bytes."""
MAX_REASON_LEN = 500
"""Most characters of the reason why a peer was missing: a gRPC status may hold thousands."""
MAX_DRAFT_LEN = 4096
"""Most nodes in one message: as many as a tree holds."""
MAX_Q_ROW_LEN = 1024
"""Most tokens in the distribution that one node was drawn from."""
MAX_Q_ROW_TOTAL = 2**31 - 1
"""Largest sum of their weights."""
MAX_DRAFT_COUNT = 1 << 20
"""Most forwards, rows or nodes that are counted for one message: several hundred for each node that it may have."""
MAX_TIME_US = 60_000_000
"""Longest time that a peer's forward or lookup is believed to take, in microseconds."""
INT32_MAX = 2**31 - 1
"""Largest number of most fields: protobuf raises ValueError beyond."""


def token_ids_from_proto(token_ids: Iterable[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """Returns the token ids, each inside the vocabulary. Raises InvalidParameter naming `field` and the index."""
    checked = tuple(token_ids)
    # min and max look at a valid prompt in C; the loop below only finds which token is the wrong one.
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        for index, token_id in enumerate(checked):
            check(0 <= token_id < vocab_size, f"{field}[{index}]", f"in [0, {vocab_size}), the vocabulary", token_id)
    return checked


def draft_from_proto(message: types_pb2.Draft, forward_us: int = 0, retrieval_us: int = 0) -> Draft:
    """Converts new nodes and their times. Lists of different lengths are cut to the shortest: the content rule needs no
    more. Counts and times do not affect the text: impossible ones are cut to possible ones."""
    for name in ("parent_offsets", "token_ids", "costs", "q_rows"):
        length = len(getattr(message, name))
        check(length <= MAX_DRAFT_LEN, f"draft.{name}", f"at most {MAX_DRAFT_LEN} long", length)
    # Enums of proto3 are open: a number that a newer peer knows arrives as it was sent.
    source = message.source if message.source in Source._value2member_map_ else Source.DRAFT.value
    return Draft(
        base_len=message.base_len,
        first_node_id=message.first_node_id,
        parent_offsets=message.parent_offsets,
        token_ids=message.token_ids,
        logprobs=[-min(cost, MAX_COST) / COST_PER_NAT for cost in message.costs],
        source=Source(source),
        q_rows=[_sparse_row(row) for row in message.q_rows],
        forward_us=min(forward_us, MAX_TIME_US),
        retrieval_us=min(retrieval_us, MAX_TIME_US),
        num_forwards=min(message.num_forwards, MAX_DRAFT_COUNT),
        num_phrase_tokens=min(message.num_phrase_tokens, MAX_DRAFT_COUNT),
        num_rows=min(message.num_rows, MAX_DRAFT_COUNT),
        num_withheld_nodes=min(message.num_withheld_nodes, MAX_DRAFT_COUNT),
    )


def last_node_id(draft: types_pb2.Draft) -> int:
    """Returns the latest node of a draft, to be acknowledged, within the range of the field."""
    # A drafter may have written anything.
    return min(max(0, draft.first_node_id + len(draft.token_ids) - 1), INT32_MAX)


def _sparse_row(message: types_pb2.SparseRow) -> SparseRow | None:
    """Converts the distribution that a token was drawn from. None means that the token was picked, not drawn, or that
    the row is not a distribution."""
    length = max(len(message.token_ids), len(message.weights))
    check(length <= MAX_Q_ROW_LEN, "draft.q_rows", f"at most {MAX_Q_ROW_LEN} tokens each", length)
    token_ids, weights = tuple(message.token_ids), tuple(message.weights)
    # An empty row, which stands for a picked token, has no least weight: its default of 0 makes it None.
    is_whole = len(token_ids) == len(weights) == len(set(token_ids)) and min(weights, default=0) >= 1
    return SparseRow(token_ids, weights) if is_whole and sum(weights) <= MAX_Q_ROW_TOTAL else None


def source_to_proto(source: Source) -> types_pb2.Source:
    """Converts the source of a token; the numbers are those of the wire."""
    return cast(types_pb2.Source, source.value)


def finish_reason_to_proto(reason: FinishReason) -> verifier_pb2.FinishReason:
    """Converts the reason for the end of a generation; the numbers are those of the wire."""
    return cast(verifier_pb2.FinishReason, reason.value)


def costs_to_proto(logprobs: Iterable[float]) -> list[int]:
    """Converts log-probabilities of drafted tokens."""
    # Bounded before it is rounded: a token of probability 0 has an infinite cost, on which round() raises.
    return [round(min(MAX_COST, max(0.0, -logprob * COST_PER_NAT))) for logprob in logprobs]


def draft_to_proto(draft: Draft) -> types_pb2.Draft:
    """Converts new nodes, about 6 bytes each."""
    return types_pb2.Draft(
        base_len=draft.base_len,
        first_node_id=draft.first_node_id,
        parent_offsets=draft.parent_offsets,
        token_ids=draft.token_ids,
        costs=costs_to_proto(draft.logprobs),
        source=source_to_proto(draft.source),
        q_rows=[
            types_pb2.SparseRow(token_ids=row.token_ids, weights=row.weights) if row else types_pb2.SparseRow()
            for row in draft.q_rows
        ],
        num_forwards=draft.num_forwards,
        num_phrase_tokens=draft.num_phrase_tokens,
        num_rows=draft.num_rows,
        num_withheld_nodes=draft.num_withheld_nodes,
    )


def summary_to_proto(
    method: Method,
    statistics: Statistics,
    requested_method: Method | None = None,
    traffic: Traffic | None = None,
    reasons: Mapping[tuple[Peer, Absence], str] = {},
) -> verifier_pb2.SpeculationSummary:
    """Sums the speculation of one generation up. Counts are copied by their names.

    Args:
        method: The method in use.
        statistics: The counts and times of the generation.
        requested_method: The method that `method` replaces. None means that `method` itself was requested.
        traffic: The bytes that were exchanged with the drafter. None means that there was no drafter.
        reasons: Known reasons why peers were missing, in words.
    """
    return verifier_pb2.SpeculationSummary(
        method=METHODS_TO_PROTO[method],
        requested_method=None if requested_method is None else METHODS_TO_PROTO[requested_method],
        accepted_by_source=[
            types_pb2.SourceCount(source=source_to_proto(source), num_tokens=count)
            for source, count in sorted(statistics.accepted_by_source.items(), key=lambda item: item[0].value)
        ],
        degraded=statistics.degraded,
        missing_peers=[
            missing_peer(peer, absence, num_rounds, reasons.get((peer, absence), ""))
            for (peer, absence), num_rounds in statistics.missing.num_rounds.items()
        ],
        decisions=[_decision_to_proto(decision) for decision in statistics.decisions],
        times_p50=_median_times(statistics),
        **_counts_of(statistics, traffic or Traffic()),
    )


def missing_peer(peer: Peer, absence: Absence, num_rounds: int, reason: str) -> verifier_pb2.MissingPeer:
    """Says which peer was missing, why, and for how many rounds; the numbers are those of the wire."""
    return verifier_pb2.MissingPeer(
        peer=cast(verifier_pb2.Peer, peer.value),
        absence=cast(verifier_pb2.Absence, absence.value),
        num_rounds=num_rounds,
        reason=reason[:MAX_REASON_LEN],
    )


def _counts_of(statistics: Statistics, traffic: Traffic) -> dict[str, Any]:
    # A text of many hours may count more than the field holds: the largest number then stands for it.
    return {name: min(getattr(statistics, name), INT32_MAX) for name in COUNTS} | asdict(traffic)


def _median_times(statistics: Statistics) -> verifier_pb2.RoundTimes:
    """Returns medians by the names of the fields: a time is one of `RoundTime` or of `DraftTime`."""
    medians = {}
    for field in verifier_pb2.RoundTimes.DESCRIPTOR.fields:
        # The fields of a dataclass with slots are attributes of the class, which hasattr finds.
        times = statistics.round_times if hasattr(RoundTime, field.name) else statistics.draft_times
        medians[field.name] = median_or_zero([getattr(time, field.name) for time in times])
    return verifier_pb2.RoundTimes(**medians)


def _decision_to_proto(decision: Decision) -> verifier_pb2.Decision:
    return verifier_pb2.Decision(
        method=METHODS_TO_PROTO[decision.strategy.method],
        rows=cast(types_pb2.Rows, decision.strategy.rows.value),
        retrieval=decision.strategy.retrieval,
        num_rounds=decision.num_rounds,
        num_tokens=decision.num_tokens,
        time_ms=decision.time_ms,
    )
