"""Messages of the datastore to values, checked, and back.

Every check raises InvalidParameter, which names the field and the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.ngrams import Continuation, TokenId
from outrider.core.params import InvalidParameter, check
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.store import DEFAULT_CORPUS, Rejection, Scope
from outrider.v1 import datastore_pb2 as pb

MAX_NAME_LEN = 256
"""Longest tokenizer hash, session id and corpus name: they become parts of keys."""


def scope_from(message: pb.LookupRequest | pb.RecordRequest | pb.LoadPriorRequest, before: Scope | None) -> Scope:
    """The scope of a message on a stream: its own, or that of the messages before it."""
    if message.HasField("scope"):
        return scope_from_proto(message.scope)
    if before is None:
        raise InvalidParameter("scope", "set in the first message of a stream", "none")
    return before


def scope_from_proto(scope: pb.Scope) -> Scope:
    check(scope.tokenizer_hash != "", "scope.tokenizer_hash", "set", "''")
    for field in ("tokenizer_hash", "session_id", "corpus"):
        length = len(getattr(scope, field))
        check(length <= MAX_NAME_LEN, f"scope.{field}", f"at most {MAX_NAME_LEN} characters long", length)
    return Scope(scope.tokenizer_hash, scope.session_id, scope.corpus or DEFAULT_CORPUS)


def session_scope_from(message: pb.RecordRequest, before: Scope | None) -> Scope:
    """As scope_from, for a message that is about one session."""
    scope = scope_from(message, before)
    check(scope.session_id != "", "scope.session_id", "set: tokens are recorded for a session", "''")
    return scope


def contexts_from(request: pb.LookupRequest, settings: DatastoreSettings) -> list[Sequence[TokenId]]:
    limit = settings.max_num_queries
    check(len(request.queries) <= limit, "queries", f"at most {limit} in one message", len(request.queries))
    for index, query in enumerate(request.queries):
        check(query.base_len >= 0, f"queries[{index}].base_len", ">= 0", query.base_len)
    return [
        tokens_from(query.context_token_ids, f"queries[{index}].context_token_ids", settings.max_context_len)
        for index, query in enumerate(request.queries)
    ]


def lengths_from(request: pb.LookupRequest, settings: DatastoreSettings) -> tuple[int, int]:
    """Longest suffix tried and longest continuation, in tokens."""
    lengths = []
    for field in ("max_match_len", "max_continuation_len"):
        value, limit = getattr(request, field), getattr(settings, field)
        check(0 <= value <= limit, field, f"in [1, {limit}], or 0 for the default", value)
        lengths.append(value or limit)
    return lengths[0], lengths[1]


def accepted_from(request: pb.RecordRequest, settings: DatastoreSettings) -> Sequence[TokenId]:
    if not request.accepted_token_ids:
        return ()
    return tokens_from(request.accepted_token_ids, "accepted_token_ids", settings.max_num_tokens)


def rejections_from(request: pb.RecordRequest, settings: DatastoreSettings) -> list[Rejection]:
    limit = settings.max_num_rejections
    check(len(request.rejections) <= limit, "rejections", f"at most {limit} in one message", len(request.rejections))
    found = []
    for index, rejection in enumerate(request.rejections):
        context, rejected, continuation = (
            tokens_from(getattr(rejection, field), f"rejections[{index}].{field}", settings.max_rejection_len)
            for field in ("context_token_ids", "rejected_token_ids", "continuation_token_ids")
        )
        found.append(Rejection(context, rejected, continuation))
    return found


def documents_from(request: pb.LoadPriorRequest, settings: DatastoreSettings) -> list[Sequence[TokenId]]:
    return [
        tokens_from(document.token_ids, f"documents[{index}].token_ids", settings.max_num_tokens)
        for index, document in enumerate(request.documents)
    ]


def tokens_from(token_ids: Sequence[int], field: str, max_len: int) -> Sequence[TokenId]:
    """Token ids, at least one and at most max_len, none negative."""
    check(0 < len(token_ids) <= max_len, field, f"1 to {max_len} tokens long", f"{len(token_ids)} tokens")
    lowest = min(token_ids)
    check(lowest >= 0, field, "without negative token ids", lowest)
    return token_ids


def result_from(query: pb.Query, continuation: Continuation) -> pb.LookupResult:
    """The answer to a query."""
    result = pb.LookupResult(query_id=query.query_id, base_len=query.base_len)
    if continuation.tier is not None:
        result.match_len = continuation.match_len
        result.tier = continuation.tier.value  # type: ignore[assignment]  # the values are those of the wire
        result.parent_offsets.extend(continuation.parent_offsets)
        result.token_ids.extend(continuation.token_ids)
        result.counts.extend(continuation.counts)
    return result
