"""Messages of a Watch stream: a scope's prior and shared tier, first their content, then changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

from outrider.core.retrieval.ngrams import TokenId
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.types import Prior, PriorChange, Scope
from outrider.v1 import datastore_pb2 as pb

PRIOR_PIECE_TOKENS = 16_384
"""Most tokens in one piece of a prior."""


async def watch(store: RedisStore, scope: Scope) -> AsyncGenerator[pb.WatchResponse, None]:
    """Yields all messages to a watcher. Never ends by itself. Raises StoreUnavailable."""
    sent_version: str | None = "none sent yet"  # differs from every version, and from None
    async for change in store.follow(scope):
        if not isinstance(change, PriorChange):
            yield pb.WatchResponse(shared=pb.SharedRun(context_token_ids=change.context, token_ids=change.token_ids))
            continue
        # The current prior: several changes in a row are sent as one, and a change to a prior that the tenant's own
        # hides is not sent at all.
        prior = await _current_prior(store, scope, sent_version)
        if (version := prior.version if prior else None) != sent_version:
            sent_version = version
            for piece in pieces_of(prior.documents if prior else ()):
                yield pb.WatchResponse(prior=piece)
        del prior  # or its documents would be held until the next change, which may be hours away


async def _current_prior(store: RedisStore, scope: Scope, sent_version: str | None) -> Prior | None:
    """Returns the prior that the scope's lookups use, without its documents if it is the one that was sent."""
    versions = await store.prior_versions(scope.corpus_ids)
    for corpus, version in zip(scope.corpus_ids, versions, strict=True):
        if version is not None and version == sent_version:
            return Prior(version, ())
        # A prior that was deleted after its version was read comes back as None: the next one then counts.
        if version is not None and (prior := await store.read_prior(corpus)):
            return prior
    return None


def pieces_of(documents: Sequence[Sequence[TokenId]]) -> Iterator[pb.PriorPiece]:
    """Yields a prior in messages of up to PRIOR_PIECE_TOKENS. Without documents it is one empty message."""
    piece = pb.PriorPiece(is_first=True)
    num_tokens = 0
    for document in documents:
        for start in range(0, len(document), PRIOR_PIECE_TOKENS):
            part = document[start : start + PRIOR_PIECE_TOKENS]
            # A full piece is yielded only when more follows: until then it may be the last one, which is marked.
            if num_tokens and num_tokens + len(part) > PRIOR_PIECE_TOKENS:
                piece.is_open = start > 0  # the part that comes next is not the first of its document
                yield piece
                piece, num_tokens = pb.PriorPiece(), 0
            piece.documents.add(token_ids=part)
            num_tokens += len(part)
    piece.is_last = True
    yield piece
