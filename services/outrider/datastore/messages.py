"""Messages of the datastore to values, checked, and back.

Every check raises InvalidParameter, which names the field and the rule; a tokenizer that is not served is
FailedPrecondition.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from outrider.core.params import RetrievalScope, Source, check
from outrider.core.retrieval.ngrams import Continuation, TokenId
from outrider.datastore.rings import HeldRing
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.statistics import TierStatistics
from outrider.datastore.types import ALL_TENANTS, DEFAULT_CORPUS, DEFAULT_TENANT, TIERS, Limits, Rejection, Scope
from outrider.security.callers import Caller, Role, current_caller
from outrider.telemetry.tracing import Attributes
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.errors import FailedPrecondition, PermissionDenied

MAX_NAME_LEN = 256
"""Longest tokenizer hash, session id, corpus name and tenant: they become parts of keys."""
_ALL_TIERS = frozenset(TIERS)
_TIERS_BY_VALUE = {tier.value: tier for tier in TIERS}


def scope_from(
    message: pb.LookupRequest | pb.RecordRequest | pb.LoadPriorRequest,
    before: Scope | None,
    settings: DatastoreSettings,
) -> Scope:
    """The scope of a message on a stream: its own, or that of the messages before it."""
    if message.HasField("scope"):
        return scope_from_proto(message.scope, settings)
    check(before is not None, "scope", "set in the first message of a stream", "none")
    assert before is not None
    return before


def scope_from_proto(scope: pb.Scope, settings: DatastoreSettings) -> Scope:
    """A scope with its defaults in place."""
    check(scope.tokenizer_hash != "", "scope.tokenizer_hash", "set", "''")
    for field in ("tokenizer_hash", "session_id", "corpus", "tenant"):
        length = len(getattr(scope, field))
        check(length <= MAX_NAME_LEN, f"scope.{field}", f"at most {MAX_NAME_LEN} characters long", length)
    served = settings.tokenizer_hash
    if served and scope.tokenizer_hash != served:
        raise FailedPrecondition(f"this server serves tokenizer {served!r}, not {scope.tokenizer_hash!r}")
    known = scope.retrieval_scope in types_pb2.RetrievalScope.values()
    check(known, "scope.retrieval_scope", "a RetrievalScope", scope.retrieval_scope)
    retrieval_scope = RetrievalScope(scope.retrieval_scope or RetrievalScope.SESSION.value)
    check(
        not scope.contribute or retrieval_scope is not RetrievalScope.SESSION,
        "scope.contribute",
        "unset or false with the scope of one session",
        scope.contribute,
    )
    check(scope.vocab_size >= 0, "scope.vocab_size", ">= 0 (0 = not checked)", scope.vocab_size)
    return Scope(
        scope.tokenizer_hash,
        scope.session_id,
        scope.corpus or DEFAULT_CORPUS,
        scope.tenant or DEFAULT_TENANT,
        retrieval_scope,
        scope.contribute,
        scope.vocab_size,
    )


def session_scope_from(message: pb.RecordRequest, before: Scope | None, settings: DatastoreSettings) -> Scope:
    """As scope_from, for a message that is about one session."""
    scope = scope_from(message, before, settings)
    check(scope.session_id != "", "scope.session_id", "set: tokens are recorded for a session", "''")
    return scope


def watched_scope_from(request: pb.WatchRequest, settings: DatastoreSettings) -> Scope:
    """As scope_from_proto, for what all sessions of a scope share."""
    check(request.HasField("scope"), "scope", "set", "none")
    scope = scope_from_proto(request.scope, settings)
    check(scope.session_id == "", "scope.session_id", "unset: a session's own tiers are not watched", scope.session_id)
    return replace(scope, contribute=False)


def contexts_from(request: pb.LookupRequest, scope: Scope, settings: DatastoreSettings) -> list[Sequence[TokenId]]:
    """The contexts of a lookup; of each, as many of its last tokens as matter."""
    limit, queries = settings.max_num_queries, request.queries
    check(len(queries) <= limit, "queries", f"at most {limit} in one message", len(queries))
    longest = max(settings.max_match_len, settings.max_ring_match_len)
    contexts: list[Sequence[TokenId]] = []
    for index, query in enumerate(queries):
        if query.base_len < 0:
            check(False, f"queries[{index}].base_len", ">= 0", query.base_len)
        tokens = query.context_token_ids
        if not (0 < len(tokens) <= settings.max_context_len and min(tokens) >= 0 and _within(tokens, scope.vocab_size)):
            tokens_from(tokens, f"queries[{index}].context_token_ids", settings.max_context_len, scope.vocab_size)
        contexts.append(tokens[-longest:])
    return contexts


def limits_from(request: pb.LookupRequest, settings: DatastoreSettings) -> Limits:
    """Lengths, and tiers."""
    if not (request.max_match_len or request.max_continuation_len or request.tiers):
        return _default_limits(settings.max_match_len, settings.max_continuation_len)
    lengths = []
    for field in ("max_match_len", "max_continuation_len"):
        value, limit = getattr(request, field), getattr(settings, field)
        check(0 <= value <= limit, field, f"in [1, {limit}], or 0 for the default", value)
        lengths.append(value or limit)
    tiers = _ALL_TIERS
    if request.tiers:
        for index, value in enumerate(request.tiers):
            check(value in _TIERS_BY_VALUE, f"tiers[{index}]", f"one of {_tier_names()}", value)
        tiers = frozenset(_TIERS_BY_VALUE[value] for value in request.tiers)
    return Limits(lengths[0], lengths[1], tiers)


@lru_cache
def _default_limits(max_match_len: int, max_continuation_len: int) -> Limits:
    return Limits(max_match_len, max_continuation_len)


def _tier_names() -> str:
    return ", ".join(tier.name for tier in TIERS)


def base_len_from(request: pb.RecordRequest) -> int:
    """Position of the first accepted token."""
    check(request.base_len >= 0, "base_len", ">= 0", request.base_len)
    return request.base_len


def accepted_from(request: pb.RecordRequest, scope: Scope, settings: DatastoreSettings) -> Sequence[TokenId]:
    """The accepted tokens; there may be none."""
    if not request.accepted_token_ids:
        return ()
    return tokens_from(request.accepted_token_ids, "accepted_token_ids", settings.max_num_tokens, scope.vocab_size)


def rejections_from(request: pb.RecordRequest, scope: Scope, settings: DatastoreSettings) -> list[Rejection]:
    """The refused drafts; there may be none."""
    limit, max_len, vocab_size = settings.max_num_rejections, settings.max_rejection_len, scope.vocab_size
    check(len(request.rejections) <= limit, "rejections", f"at most {limit} in one message", len(request.rejections))
    return [
        Rejection(
            tokens_from(each.context_token_ids, f"rejections[{i}].context_token_ids", max_len, vocab_size),
            tokens_from(each.rejected_token_ids, f"rejections[{i}].rejected_token_ids", max_len, vocab_size),
            tokens_from(each.continuation_token_ids, f"rejections[{i}].continuation_token_ids", max_len, vocab_size),
        )
        for i, each in enumerate(request.rejections)
    ]


def accepted_by_tier_from(request: pb.RecordRequest) -> list[tuple[Source, int]]:
    """What the statistics are told."""
    limit, length = len(TIERS), len(request.accepted_by_tier)
    check(length <= limit, "accepted_by_tier", f"at most {limit} long, one entry for each tier", length)
    for index, each in enumerate(request.accepted_by_tier):
        field = f"accepted_by_tier[{index}]"
        check(each.source in _TIERS_BY_VALUE, f"{field}.source", f"one of {_tier_names()}", each.source)
        check(each.num_tokens >= 0, f"{field}.num_tokens", ">= 0", each.num_tokens)
    return [(_TIERS_BY_VALUE[each.source], each.num_tokens) for each in request.accepted_by_tier]


def tokens_from(token_ids: Sequence[int], field: str, max_len: int, vocab_size: int) -> Sequence[TokenId]:
    """Token ids, at least one and at most max_len, none negative, none beyond the vocabulary if its size is known."""
    check(0 < len(token_ids) <= max_len, field, f"1 to {max_len} tokens long", f"{len(token_ids)} tokens")
    lowest = min(token_ids)
    check(lowest >= 0, field, "without negative token ids", lowest)
    if vocab_size:
        highest = max(token_ids)
        check(highest < vocab_size, field, f"token ids below scope.vocab_size ({vocab_size})", highest)
    return token_ids


def document_from(token_ids: Sequence[int], field: str, max_len: int, vocab_size: int) -> array[TokenId]:
    """As tokens_from, for a million of them: nobody else is served meanwhile."""
    check(0 < len(token_ids) <= max_len, field, f"1 to {max_len} tokens long", f"{len(token_ids)} tokens")
    document = array("i", token_ids)
    numbers = np.frombuffer(document, np.intc)
    tokens_from([int(numbers.min()), int(numbers.max())], field, max_len, vocab_size)
    return document


def _within(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not vocab_size or max(token_ids) < vocab_size


def result_from(query: pb.Query, continuation: Continuation) -> pb.LookupResult:
    """The answer to a query."""
    tier = continuation.tier
    if tier is None:
        return pb.LookupResult(query_id=query.query_id, base_len=query.base_len)
    return pb.LookupResult(
        query_id=query.query_id,
        base_len=query.base_len,
        match_len=continuation.match_len,
        tier=tier.value,  # type: ignore[arg-type]  # the values are those of the wire
        parent_offsets=continuation.parent_offsets,
        token_ids=continuation.token_ids,
        counts=continuation.counts,
    )


def lookup_attributes(scope: Scope, response: pb.LookupResponse) -> Attributes:
    """What the trace of a lookup says: how much was found, not what."""
    return {
        "outrider.session_id": scope.session_id,
        "outrider.num_queries": len(response.results),
        "outrider.num_matched_queries": sum(result.match_len > 0 for result in response.results),
        "outrider.is_local": response.is_local,
    }


def tier_info_from(tier: Source, counts: TierStatistics) -> pb.TierInfo:
    """What a tier has done."""
    return pb.TierInfo(
        tier=tier.value,  # type: ignore[arg-type]
        num_hits=counts.num_hits,
        num_matched_tokens=counts.num_matched_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
    )


def ring_info_from(held: HeldRing) -> pb.RingInfo:
    """A ring, as this replica holds it."""
    return pb.RingInfo(
        tenant=held.tenant,
        num_tokens=held.ring.num_tokens,
        num_indexed_tokens=held.ring.num_indexed_tokens,
        build_ms=held.build_ms,
        tokenizer_hash=held.tokenizer_hash,
        corpus=held.corpus,
    )


def own_scope(scope: Scope, named: str) -> Scope:
    """The scope, as far as its tokens are the caller's to read and write.

    Args:
        scope: With its defaults in place.
        named: The tenant that the message names; empty = none, which means the caller's own.

    Raises:
        PermissionDenied: it is another's.
    """
    caller = current_caller()
    if caller is None or caller.speaks_for_all:
        return scope
    own = _own_tenant(caller)
    if named not in ("", own):
        raise PermissionDenied(f"scope.tenant must be the caller's own, {own!r}, or unset, got {named!r}")
    return replace(scope, tenant=own)


def check_manages(tenant: str) -> None:
    """Raises PermissionDenied unless the caller may change the prior of a tenant, or with ALL_TENANTS that of all."""
    caller = current_caller()
    if caller is None or caller.speaks_for_all or not caller.tenant or tenant == caller.tenant:
        return
    rule = "the caller's own: the prior of all tenants, and those of others, are not its to change"
    raise PermissionDenied(f"scope.tenant must be {caller.tenant!r}, {rule}, got {tenant!r}")


def may_see(tenant: str) -> bool:
    """Whether the caller may know of what belongs to a tenant, or with ALL_TENANTS to all."""
    caller = current_caller()
    if caller is None or caller.speaks_for_all or tenant == ALL_TENANTS:
        return True
    is_manager_of_all = Role.MANAGE in caller.roles and not caller.tenant
    return is_manager_of_all or tenant == _own_tenant(caller)


def _own_tenant(caller: Caller) -> str:
    return caller.tenant or DEFAULT_TENANT
