"""Watch: a scope's prior and shared tier, first what there is, then what changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

from outrider.core.retrieval.ngrams import TokenId
from outrider.datastore.types import ALL_TENANTS, Prior, PriorChange, Scope, Store
from outrider.v1 import datastore_pb2 as pb

PIECE_LEN = 16_384
"""Tokens in one piece of a prior."""


async def watch(store: Store, scope: Scope) -> AsyncGenerator[pb.WatchResponse, None]:
    """Everything that a watcher is sent. Never ends by itself. Raises StoreUnavailable."""
    sent: str | None = "none yet"
    async for change in store.follow(scope):
        if not isinstance(change, PriorChange):
            yield pb.WatchResponse(shared=pb.SharedRun(context_token_ids=change.context, token_ids=change.token_ids))
            continue
        # What counts is what there is now: several changes in a row are one, and some are none.
        prior = await _prior_of(store, scope, sent)
        if (version := prior.version if prior else None) != sent:
            sent = version
            for piece in pieces_of(prior.documents if prior else ()):
                yield pb.WatchResponse(prior=piece)
        del prior  # the next change may be hours away


async def _prior_of(store: Store, scope: Scope, sent: str | None) -> Prior | None:
    """The prior that the scope's lookups use. Its documents are read only if it is another one than was sent."""
    tenants = (scope.tenant, ALL_TENANTS)
    versions = await store.prior_versions([(scope, tenant) for tenant in tenants])
    for tenant, version in zip(tenants, versions, strict=True):
        if version is not None and version == sent:
            return Prior(version, ())
        if version is not None and (prior := await store.read_prior(scope, tenant)):
            return prior
    return None


def pieces_of(documents: Sequence[Sequence[TokenId]]) -> Iterator[pb.PriorPiece]:
    """A prior in messages of about PIECE_LEN tokens. No documents: one message without any."""
    piece = pb.PriorPiece(is_first=True)
    num_tokens = 0
    for document in documents:
        for start in range(0, len(document), PIECE_LEN):
            # The one before is complete, unless this is the first: only now is it known not to be the last.
            if num_tokens and num_tokens + min(len(document) - start, PIECE_LEN) > PIECE_LEN:
                piece.is_open = start > 0
                yield piece
                piece, num_tokens = pb.PriorPiece(), 0
            part = document[start : start + PIECE_LEN]
            piece.documents.add(token_ids=part)
            num_tokens += len(part)
    piece.is_last = True
    yield piece
