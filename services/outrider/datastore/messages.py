"""Messages of the datastore, converted to checked commands, and answers converted back.

Each request becomes one value in one call: its fields are checked, its defaults are in place, and its tenant is one
that the caller may name. Every check of a field raises InvalidParameter, which names the field and the rule.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from outrider.core.params import RetrievalScope, Source, check
from outrider.core.retrieval.ngrams import Continuation, TokenId
from outrider.datastore.metrics import TierStatistics
from outrider.datastore.rings import HeldRing
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import (
    ALL_TENANTS,
    DEFAULT_CORPUS,
    TIERS,
    CorpusInfo,
    Limits,
    LookupCommand,
    RecordCommand,
    Rejection,
    Scope,
)
from outrider.security.callers import DEFAULT_TENANT, Caller, Role, current_caller
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.errors import FailedPrecondition, PermissionDenied

MAX_NAME_LEN = 256
"""Longest tokenizer hash, session id, corpus name and tenant, in characters. They become parts of keys."""
_ALL_TIERS = frozenset(TIERS)
_TIERS_BY_VALUE = {tier.value: tier for tier in TIERS}
_TIER_NAMES = ", ".join(tier.name for tier in TIERS)


# Requests -------------------------------------------------------------------------------------------------------------


def lookup_command(request: pb.LookupRequest, before: Scope | None, settings: DatastoreSettings) -> LookupCommand:
    """Converts a request to look contexts up.

    Args:
        request: A message of a stream.
        before: Scope of the previous message on the stream. Used if this message has none.
        settings: The server's limits and defaults.

    Raises:
        InvalidParameter: A field is missing, or outside its range.
        FailedPrecondition: This server serves another tokenizer.
        PermissionDenied: The tenant is not the caller's own.
    """
    scope = _scope_on_stream(request, before, settings)
    return LookupCommand(scope, _contexts(request, scope, settings), _limits(request, settings))


def record_command(request: pb.RecordRequest, before: Scope | None, settings: DatastoreSettings) -> RecordCommand:
    """Converts a request to record tokens. Arguments and errors are those of `lookup_command`."""
    scope = _scope_on_stream(request, before, settings)
    check(scope.session_id != "", "scope.session_id", "set: tokens are recorded for a session", "''")
    check(request.base_len >= 0, "base_len", ">= 0", request.base_len)
    accepted: Sequence[TokenId] = request.accepted_token_ids
    # A record without tokens is valid: it may carry refused drafts, or end the session.
    if accepted:
        _check_tokens(accepted, "accepted_token_ids", settings.max_num_tokens, scope.vocab_size)
    return RecordCommand(
        scope,
        request.base_len,
        accepted,
        _rejections(request, scope, settings),
        _accepted_by_tier(request),
        request.end_session,
    )


def watched_scope(request: pb.WatchRequest, settings: DatastoreSettings) -> Scope:
    """Converts a request to watch a scope. Its errors are those of `lookup_command`."""
    check(request.HasField("scope"), "scope", "set", "none")
    scope = _callers_scope(request.scope, settings)
    check(scope.session_id == "", "scope.session_id", "unset: a session's own tiers are not watched", scope.session_id)
    return replace(scope, contribute=False)


def managed_scope(scope: pb.Scope, settings: DatastoreSettings) -> Scope:
    """Converts the scope of a request to load or to delete a prior.

    Unlike the scope of a session it has no default tenant: an empty one means the prior of all tenants.

    Raises:
        InvalidParameter: A field is missing, or outside its range.
        FailedPrecondition: This server serves another tokenizer.
        PermissionDenied: The prior is not the caller's to change.
    """
    converted = scope_from(scope, settings)
    caller = _limited_caller()
    if caller is not None and caller.tenant not in ("", scope.tenant):  # a manager without a tenant manages all
        rule = "the caller's own: the prior of all tenants, and those of others, are not its to change"
        raise PermissionDenied(f"scope.tenant must be {caller.tenant!r}, {rule}, got {scope.tenant!r}")
    # The message's own tenant: `scope_from` has replaced an empty one by DEFAULT_TENANT.
    return replace(converted, tenant=scope.tenant)


def scope_from(scope: pb.Scope, settings: DatastoreSettings) -> Scope:
    """Converts a scope without regard to the caller. Raises InvalidParameter and FailedPrecondition."""
    check(scope.tokenizer_hash != "", "scope.tokenizer_hash", "set", "''")
    for field in ("tokenizer_hash", "session_id", "corpus", "tenant"):
        length = len(getattr(scope, field))
        check(length <= MAX_NAME_LEN, f"scope.{field}", f"at most {MAX_NAME_LEN} characters long", length)
    served = settings.tokenizer_hash
    if served and scope.tokenizer_hash != served:
        raise FailedPrecondition(f"this server serves tokenizer {served!r}, not {scope.tokenizer_hash!r}")
    # Enums of proto3 are open: a number that this server does not know arrives as it was sent.
    is_known = scope.retrieval_scope in types_pb2.RetrievalScope.values()
    check(is_known, "scope.retrieval_scope", "a RetrievalScope", scope.retrieval_scope)
    # 0 is UNSPECIFIED, which our enum does not have.
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


def documents_from(request: pb.LoadPriorRequest, scope: Scope, settings: DatastoreSettings) -> Iterator[array[TokenId]]:
    """Yields the documents of one message of a prior. Raises InvalidParameter."""
    for index, document in enumerate(request.documents):
        field, max_len = f"documents[{index}].token_ids", settings.max_document_len
        # The length first: numpy raises an error of its own for the minimum of an empty array.
        _check_length(document.token_ids, field, max_len)
        token_ids = array("i", document.token_ids)
        # numpy finds both bounds of a million tokens in 0.4 ms; min() and max() would hold lookups up for 100 ms.
        numbers = np.frombuffer(token_ids, np.intc)
        _check_tokens([int(numbers.min()), int(numbers.max())], field, max_len, scope.vocab_size)
        yield token_ids


def _scope_on_stream(
    request: pb.LookupRequest | pb.RecordRequest, before: Scope | None, settings: DatastoreSettings
) -> Scope:
    if request.HasField("scope"):
        return _callers_scope(request.scope, settings)
    check(before is not None, "scope", "set in the first message of a stream", "none")
    assert before is not None
    return before


def _contexts(request: pb.LookupRequest, scope: Scope, settings: DatastoreSettings) -> list[Sequence[TokenId]]:
    """Returns the last tokens of each context, as many as any tier can match."""
    limit, queries = settings.max_num_queries, request.queries
    check(len(queries) <= limit, "queries", f"at most {limit} in one message", len(queries))
    longest, max_len = max(settings.max_match_len, settings.max_ring_match_len), settings.max_context_len
    contexts: list[Sequence[TokenId]] = []
    for index, query in enumerate(queries):
        # On the path of every lookup: the name of a field is only built for a query that is refused.
        if query.base_len < 0:
            check(False, f"queries[{index}].base_len", ">= 0", query.base_len)
        tokens = query.context_token_ids
        if not (0 < len(tokens) <= max_len and min(tokens) >= 0 and _is_below(tokens, scope.vocab_size)):
            _check_tokens(tokens, f"queries[{index}].context_token_ids", max_len, scope.vocab_size)
        contexts.append(tokens[-longest:])
    return contexts


def _limits(request: pb.LookupRequest, settings: DatastoreSettings) -> Limits:
    if not (request.max_match_len or request.max_continuation_len or request.tiers or request.whole_runs):
        return _default_limits(settings.max_match_len, settings.max_continuation_len)
    for field in ("max_match_len", "max_continuation_len"):
        value, limit = getattr(request, field), getattr(settings, field)
        check(0 <= value <= limit, field, f"in [1, {limit}], or 0 for the default", value)
    for index, number in enumerate(request.tiers):
        check(number in _TIERS_BY_VALUE, f"tiers[{index}]", f"one of {_TIER_NAMES}", number)
    return Limits(
        request.max_match_len or settings.max_match_len,
        request.max_continuation_len or settings.max_continuation_len,
        frozenset(_TIERS_BY_VALUE[number] for number in request.tiers) or _ALL_TIERS,
        request.whole_runs,
    )


@lru_cache
def _default_limits(max_match_len: int, max_continuation_len: int) -> Limits:
    return Limits(max_match_len, max_continuation_len)


def _rejections(request: pb.RecordRequest, scope: Scope, settings: DatastoreSettings) -> list[Rejection]:
    limit, num_rejections = settings.max_num_rejections, len(request.rejections)
    check(num_rejections <= limit, "rejections", f"at most {limit} in one message", num_rejections)
    for index, each in enumerate(request.rejections):
        for field in ("context_token_ids", "rejected_token_ids"):
            token_ids, name = getattr(each, field), f"rejections[{index}].{field}"
            _check_tokens(token_ids, name, settings.max_rejection_len, scope.vocab_size)
    return [Rejection(each.context_token_ids, each.rejected_token_ids) for each in request.rejections]


def _accepted_by_tier(request: pb.RecordRequest) -> list[tuple[Source, int]]:
    limit, length = len(TIERS), len(request.accepted_by_tier)
    check(length <= limit, "accepted_by_tier", f"at most {limit} long, one entry for each tier", length)
    for index, each in enumerate(request.accepted_by_tier):
        field = f"accepted_by_tier[{index}]"
        check(each.source in _TIERS_BY_VALUE, f"{field}.source", f"one of {_TIER_NAMES}", each.source)
        check(each.num_tokens >= 0, f"{field}.num_tokens", ">= 0", each.num_tokens)
    return [(_TIERS_BY_VALUE[each.source], each.num_tokens) for each in request.accepted_by_tier]


def _check_tokens(token_ids: Sequence[int], field: str, max_len: int, vocab_size: int) -> None:
    """Checks that there are 1 to max_len token ids, none negative, none beyond a vocabulary of known size."""
    _check_length(token_ids, field, max_len)
    lowest = min(token_ids)
    check(lowest >= 0, field, "without negative token ids", lowest)
    if not _is_below(token_ids, vocab_size):
        check(False, field, f"token ids below scope.vocab_size ({vocab_size})", max(token_ids))


def _check_length(token_ids: Sequence[int], field: str, max_len: int) -> None:
    check(0 < len(token_ids) <= max_len, field, f"1 to {max_len} tokens long", f"{len(token_ids)} tokens")


def _is_below(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not vocab_size or max(token_ids) < vocab_size


# Tenancy --------------------------------------------------------------------------------------------------------------


def may_see(tenant: str) -> bool:
    """Returns True if the caller may see what belongs to a tenant, or to all tenants (ALL_TENANTS)."""
    caller = _limited_caller()
    if caller is None or tenant == ALL_TENANTS:
        return True
    is_manager_of_all = Role.MANAGE in caller.roles and not caller.tenant
    return is_manager_of_all or tenant == _own_tenant(caller)


def _callers_scope(scope: pb.Scope, settings: DatastoreSettings) -> Scope:
    """Converts a scope whose tokens the caller reads or writes. Raises PermissionDenied if they are another's.

    The tenant comes from the credentials. The one in the message counts only for callers who speak for all tenants.
    """
    converted = scope_from(scope, settings)
    caller = _limited_caller()
    if caller is None:
        return converted
    own = _own_tenant(caller)
    if scope.tenant not in ("", own):
        raise PermissionDenied(f"scope.tenant must be the caller's own, {own!r}, or unset, got {scope.tenant!r}")
    return replace(converted, tenant=own)


def _limited_caller() -> Caller | None:
    """Returns the caller, or None if it may name any tenant: a service, or a caller who need not sign in."""
    caller = current_caller()
    return None if caller is None or caller.speaks_for_all else caller


def _own_tenant(caller: Caller) -> str:
    return caller.tenant or DEFAULT_TENANT


# Answers --------------------------------------------------------------------------------------------------------------


def lookup_result(query: pb.Query, continuation: Continuation) -> pb.LookupResult:
    """Converts the answer to a query."""
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


def corpus_info(info: CorpusInfo) -> pb.CorpusInfo:
    """Converts the description of a stored prior."""
    return pb.CorpusInfo(
        tokenizer_hash=info.id.tokenizer_hash,
        corpus=info.id.corpus,
        tenant=info.id.tenant,
        num_tokens=info.num_tokens,
        num_ngrams=info.num_ngrams,
    )


def tier_info(tier: Source, statistics: TierStatistics) -> pb.TierInfo:
    """Converts the counts of a tier."""
    return pb.TierInfo(
        tier=tier.value,  # type: ignore[arg-type]
        num_hits=statistics.num_hits,
        num_matched_tokens=statistics.num_matched_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
    )


def ring_info(held: HeldRing) -> pb.RingInfo:
    """Converts the description of a ring that this replica holds."""
    return pb.RingInfo(
        tokenizer_hash=held.id.tokenizer_hash,
        corpus=held.id.corpus,
        tenant=held.id.tenant,
        num_tokens=held.ring.num_tokens,
        num_indexed_tokens=held.ring.num_indexed_tokens,
        build_ms=held.build_ms,
    )
