"""Wire to domain and back: the one place where protobuf messages and core types meet.

`*_from_proto` raise InvalidParameter naming the field as the wire calls it; nothing is clipped and nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from outrider.core.params import Method, RetrievalScope, SamplingParams, Source, check
from outrider.core.session import FinishReason
from outrider.core.sparse_rows import SparseRow
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Statistics, median_or_zero
from outrider.core.tree import Draft
from outrider.v1 import types_pb2, verifier_pb2

PROTOCOL_VERSION = 1

METHODS = {
    types_pb2.METHOD_OFF: Method.OFF,
    types_pb2.METHOD_SPECULATIVE: Method.SPECULATIVE,
    types_pb2.METHOD_PEARL: Method.PEARL,
    types_pb2.METHOD_RETRIEVAL: Method.RETRIEVAL,
}
METHODS_TO_PROTO = {method: value for value, method in METHODS.items()}

COST_PER_NAT = 32
MAX_COST = 1023


def method_from_proto(value: int, default: Method) -> Method:
    """The method; unset = the default. A number this server does not know is invalid."""
    if value == types_pb2.METHOD_UNSPECIFIED:
        return default
    known = sorted(types_pb2.Method.Name(number) for number in METHODS)
    check(value in METHODS, "speculation.method", f"one of {', '.join(known)}", value)
    return METHODS[cast(types_pb2.Method, value)]


def sampling_from_proto(message: types_pb2.SamplingParams, default_seed: int) -> SamplingParams:
    """How tokens are drawn; unset fields have the defaults that the proto states."""
    defaults = SamplingParams()
    return SamplingParams(
        seed=message.seed if message.HasField("seed") else default_seed,
        temperature=message.temperature if message.HasField("temperature") else defaults.temperature,
        top_k=message.top_k if message.HasField("top_k") else defaults.top_k,
        top_p=message.top_p if message.HasField("top_p") else defaults.top_p,
        min_p=message.min_p if message.HasField("min_p") else defaults.min_p,
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """How tokens are drawn, every field set."""
    return types_pb2.SamplingParams(
        seed=params.seed, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def speculation_from_proto(
    message: types_pb2.SpeculationParams, defaults: SpeculationParams, max_num_speculative_tokens: int
) -> SpeculationParams:
    """How drafts are made. Unset fields come from the server's defaults."""
    method = method_from_proto(message.method, defaults.method)
    gamma = defaults.num_speculative_tokens
    if message.HasField("num_speculative_tokens"):
        gamma = message.num_speculative_tokens
        check(
            1 <= gamma <= max_num_speculative_tokens,
            "speculation.num_speculative_tokens",
            f"in [1, {max_num_speculative_tokens}], this server's limit",
            gamma,
        )
    lookahead = max(defaults.lookahead, gamma)
    if message.HasField("lookahead"):
        lookahead = message.lookahead
        check(
            method is Method.PEARL, "speculation.lookahead", "unset for a method that does not draft ahead", lookahead
        )
        limit = max_lookahead(max_num_speculative_tokens)
        check(lookahead <= limit, "speculation.lookahead", f"at most {limit}, this server's limit", lookahead)
    probability = message.HasField("min_path_probability")
    retrieves = message.retrieval or method is Method.RETRIEVAL
    scope, contribute = _retrieval_from_proto(message, retrieves, defaults.retrieval_scope)
    return SpeculationParams(
        method=method,
        num_speculative_tokens=gamma,
        lookahead=lookahead,
        min_path_probability=message.min_path_probability if probability else defaults.min_path_probability,
        retrieval=retrieves,
        retrieval_scope=scope,
        contribute=contribute,
    )


def _retrieval_from_proto(
    message: types_pb2.SpeculationParams, retrieves: bool, default: RetrievalScope
) -> tuple[RetrievalScope, bool]:
    """With whom retrieval shares, and whether the session contributes."""
    given = message.HasField("retrieval_params")
    check(retrieves or not given, "speculation.retrieval_params", "unset where nothing is retrieved", "a message")
    number, params = message.retrieval_params.scope, message.retrieval_params
    known = {scope.value: scope for scope in RetrievalScope}
    is_set = number != types_pb2.RETRIEVAL_SCOPE_UNSPECIFIED
    names = ", ".join(types_pb2.RetrievalScope.Name(cast(types_pb2.RetrievalScope, value)) for value in known)
    check(not is_set or number in known, "speculation.retrieval_params.scope", f"one of {names}", number)
    scope = known[number] if is_set else default
    if not retrieves:
        return RetrievalScope.SESSION, False
    return scope, params.contribute if params.HasField("contribute") else scope is not RetrievalScope.SESSION


def retrieval_scope_to_proto(scope: RetrievalScope) -> types_pb2.RetrievalScope:
    """With whom retrieval shares; the numbers are those of the wire."""
    return cast(types_pb2.RetrievalScope, scope.value)


def max_lookahead(max_num_speculative_tokens: int) -> int:
    """Limit of lookahead: sixteen full chains in flight hide any round trip that is worth hiding."""
    return 16 * max_num_speculative_tokens


def speculation_to_proto(params: SpeculationParams) -> types_pb2.SpeculationParams:
    """How drafts are made, every field that the method has set."""
    message = types_pb2.SpeculationParams(
        method=METHODS_TO_PROTO[params.method],
        num_speculative_tokens=params.num_speculative_tokens,
        min_path_probability=params.min_path_probability,
        retrieval=params.retrieval,
    )
    if params.method is Method.PEARL:
        message.lookahead = params.lookahead
    if params.retrieves:
        message.retrieval_params.scope = retrieval_scope_to_proto(params.retrieval_scope)
        message.retrieval_params.contribute = params.contribute
    return message


def token_ids_from_proto(token_ids: Iterable[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """Token ids, each inside the vocabulary."""
    checked = tuple(token_ids)
    for index, token_id in enumerate(checked):
        check(0 <= token_id < vocab_size, f"{field}[{index}]", f"in [0, {vocab_size}), the vocabulary", token_id)
    return checked


def draft_from_proto(message: types_pb2.Draft) -> Draft:
    """New nodes. Lists of different lengths are cut to the shortest: the content rule needs no more."""
    source = message.source if message.source in Source._value2member_map_ else Source.DRAFT.value
    return Draft(
        base_len=message.base_len,
        first_node_id=message.first_node_id,
        parent_offsets=message.parent_offsets,
        token_ids=message.token_ids,
        logprobs=[-cost / COST_PER_NAT for cost in message.costs],
        source=Source(source),
        q_rows=[_sparse_row(row) for row in message.q_rows],
    )


def _sparse_row(message: types_pb2.SparseRow) -> SparseRow | None:
    """What a token was drawn from; None = it was picked. A row that is no distribution is none."""
    token_ids, weights = tuple(message.token_ids), tuple(message.weights)
    is_whole = len(token_ids) == len(weights) == len(set(token_ids)) and min(weights, default=0) >= 1
    return SparseRow(token_ids, weights) if is_whole else None


def source_to_proto(source: Source) -> types_pb2.Source:
    """Where a token came from; the numbers are those of the wire."""
    return cast(types_pb2.Source, source.value)


def finish_reason_to_proto(reason: FinishReason) -> verifier_pb2.FinishReason:
    """Why a generation ended; the numbers are those of the wire."""
    return cast(verifier_pb2.FinishReason, reason.value)


def draft_to_proto(draft: Draft) -> types_pb2.Draft:
    """New nodes, about 6 bytes each."""
    return types_pb2.Draft(
        base_len=draft.base_len,
        first_node_id=draft.first_node_id,
        parent_offsets=draft.parent_offsets,
        token_ids=draft.token_ids,
        costs=[round(min(MAX_COST, max(0.0, -logprob * COST_PER_NAT))) for logprob in draft.logprobs],
        source=source_to_proto(draft.source),
        q_rows=[
            types_pb2.SparseRow(token_ids=row.token_ids, weights=row.weights) if row else types_pb2.SparseRow()
            for row in draft.q_rows
        ],
    )


def summary_to_proto(method: Method, statistics: Statistics) -> verifier_pb2.SpeculationSummary:
    """What speculation did in one generation."""
    times = statistics.round_times
    return verifier_pb2.SpeculationSummary(
        method=METHODS_TO_PROTO[method],
        num_rounds=statistics.num_rounds,
        num_drafted_tokens=statistics.num_drafted_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_empty_rounds=statistics.num_empty_rounds,
        num_hits=statistics.num_hits,
        accepted_by_source=[
            types_pb2.SourceCount(source=source_to_proto(source), num_tokens=count)
            for source, count in sorted(statistics.accepted_by_source.items(), key=lambda item: item[0].value)
        ],
        num_speculator_losses=statistics.num_speculator_losses,
        degraded=statistics.degraded,
        times_p50=verifier_pb2.RoundTimes(
            round_ms=median_or_zero([time.round_ms for time in times]),
            forward_ms=median_or_zero([time.forward_ms for time in times]),
            wait_ms=median_or_zero([time.wait_ms for time in times]),
            overhead_ms=median_or_zero([time.overhead_ms for time in times]),
            draft_latency_ms=median_or_zero(statistics.draft_latencies_ms),
            draft_forward_ms=median_or_zero(statistics.draft_forwards_ms),
            retrieval_ms=median_or_zero([time.retrieval_ms for time in times]),
            draft_retrieval_ms=median_or_zero(statistics.draft_retrievals_ms),
        ),
    )
