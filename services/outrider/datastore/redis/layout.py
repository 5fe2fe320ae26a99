"""What lies in Redis: keys, fields, values. The only file, besides ngrams.lua, that knows.

Names (T tokenizer, C corpus, X tenant, S session) are percent-encoded, so that none can reach into another's scope.
Every key begins with `outrider:2:{T:C}:`, but for the last two. The braces are a hash tag: in a Redis Cluster all keys
of one Function call must share a slot, so a session lives where its prior does.

    key                        type    lives   content
    prior:X                    hash    always  n-gram -> followers. X is empty for the prior of all tenants
    prior:X:documents          string  always  the corpus itself, compressed: `packed_documents`
    prior:X:info               hash    always  version (new with each load), num_tokens, num_ngrams
    prior:X:changes            stream  always  version, of what was loaded; empty = deleted. The last few
    loading:UUID               hash    10 min  a prior on its way in; renamed to prior:X at the end
    loading:UUID:documents     string  10 min  likewise
    s:X:S:tokens               string  session the stream so far, 4 bytes a token: its length is the position
    s:X:S:dynamic              hash    session n-gram -> followers, of the session's own stream
    s:X:S:rejected             hash    session n-gram -> followers; "!" + n-gram -> tokens refused after it
    t:X:shared, g:shared       hash    shared  n-gram -> followers, of a tenant's contributing sessions, or of all
    t:X:changes, g:changes     stream  shared  context, tokens: what was added to the shared tier. The last few thousand
    t:X:ring, g:ring           stream  shared  end, open, tokens: what ended sessions have said, one entry a document

    outrider:2:corpora         set     always  T:C:X of every prior. An index: what has no info does not exist

*session*: session_ttl_s after the last record; *shared*: shared_ttl_s after the last write. Only priors live for ever:
the policy volatile-lfu evicts everything else, and nothing else, when memory runs out.

Token ids are 4 bytes, counts are 4 bytes, both little-endian. An n-gram is its tokens. Followers are token id and
count, the most counted first, then the latest; refused tokens are tokens, the latest first. An entry of a ring has the
number of tokens that were ever added as `end`, itself included: the tokens of a ring are the end of its last entry less
the beginning of its first. A document of more than PIECE_LEN tokens is several entries, all but the last `open`.

The number in the names is the version of layout and functions: servers of two versions can share a Redis.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote

import numpy as np

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import FANOUT, NOTHING, Continuation, TokenId
from outrider.datastore.types import Prior, Scope

ROOT = "outrider:2:"
CORPORA = ROOT + "corpora"
LIBRARY = "outrider_ngrams_2"

TOKENS_PER_CALL = 64
"""Tokens learned in one call of a Function: Redis answers nobody else meanwhile."""
REJECTIONS_PER_CALL = 16
"""Refused drafts learned in one call."""
CONTEXTS_PER_CALL = 16
"""Contexts looked up in one call."""
FIELDS_PER_CALL = 512
"""N-grams of a prior stored in one command."""
PIECE_LEN = 65_536
"""Most tokens in one entry of a ring."""
LOADING_TTL_S = 600
"""A prior whose loading stops halfway is gone after this time."""
NUM_PRIOR_CHANGES = 16
"""Entries kept of a prior's changes."""


def _quoted(name: str) -> str:
    return quote(name, safe="")


@lru_cache(4096)
def tag(tokenizer_hash: str, corpus: str) -> str:
    """Beginning of the keys of a corpus."""
    return f"{ROOT}{{{_quoted(tokenizer_hash)}:{_quoted(corpus)}}}:"


def prior_key(scope: Scope, tenant: str) -> str:
    """The prior of one tenant; '' = of all."""
    return f"{tag(scope.tokenizer_hash, scope.corpus)}prior:{_quoted(tenant)}"


def loading_key(scope: Scope, name: str) -> str:
    """A prior on its way in."""
    return f"{tag(scope.tokenizer_hash, scope.corpus)}loading:{name}"


def session_keys(scope: Scope) -> tuple[str, str, str]:
    """tokens, dynamic, rejected."""
    session = f"{tag(scope.tokenizer_hash, scope.corpus)}s:{_quoted(scope.tenant)}:{_quoted(scope.session_id)}:"
    return session + "tokens", session + "dynamic", session + "rejected"


def wider_keys(scope: Scope) -> tuple[str, str, str] | None:
    """shared, changes, ring of the scope's tenant or of all; None for the scope of one session."""
    if scope.retrieval_scope is RetrievalScope.SESSION:
        return None
    whose = "g:" if scope.retrieval_scope is RetrievalScope.GLOBAL else f"t:{_quoted(scope.tenant)}:"
    wider = tag(scope.tokenizer_hash, scope.corpus) + whose
    return wider + "shared", wider + "changes", wider + "ring"


def corpus_entry(scope: Scope, tenant: str) -> str:
    """A member of `corpora`."""
    return f"{_quoted(scope.tokenizer_hash)}:{_quoted(scope.corpus)}:{_quoted(tenant)}"


def corpus_of(entry: bytes) -> tuple[str, str, str]:
    """Tokenizer, corpus and tenant of a member of `corpora`."""
    tokenizer_hash, corpus, tenant = (unquote(part) for part in entry.decode().split(":"))
    return tokenizer_hash, corpus, tenant


def pack(token_ids: Sequence[TokenId]) -> bytes:
    """4 bytes a token."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack(tokens: bytes | memoryview) -> array[TokenId]:
    """As many tokens as there are 4 bytes. A list would take ten times the memory."""
    return array("i", np.frombuffer(tokens, "<i4").astype(np.intc).tobytes())


def packed_documents(documents: Iterable[Sequence[TokenId]]) -> bytes:
    """A corpus: of each document its length and its tokens, 4 bytes each, all of it compressed by zlib."""
    compress = zlib.compressobj(1)
    pieces = []
    for document in documents:
        pieces.append(compress.compress(struct.pack("<I", len(document))))
        pieces.append(compress.compress(np.asarray(document, "<i4").tobytes()))
    return b"".join([*pieces, compress.flush()])


def unpacked_documents(packed: bytes) -> Iterator[array[TokenId]]:
    """The documents of `packed_documents`."""
    data = memoryview(zlib.decompress(packed))
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4 + 4 * length
        yield unpack(data[at - 4 * length : at])


def prior_from(version: bytes | None, packed: bytes | None) -> Prior | None:
    """A prior, from the version in its info and its documents; None = there is none."""
    if not version or packed is None:
        return None
    return Prior(version.decode(), tuple(unpacked_documents(packed)))


SOURCES = {source.value: source for source in Source}
HEADER = 3 + len(FANOUT)


@lru_cache(4096)
def _parent_offsets(chain_len: int, alternatives: bytes) -> tuple[int, ...]:
    """Of a chain, and of so many alternatives to its first nodes."""
    offsets = [min(index, 1) for index in range(chain_len)]
    for depth, number in enumerate(alternatives):
        for _ in range(number):
            offsets.append(len(offsets) + 1 - depth if depth else 0)
    return tuple(offsets)


def continuation_from(reply: bytes) -> Continuation:
    """The answer of the lookup Function to one context. Empty = nothing was found.

    One byte each: match length, tier, nodes of the chain, alternatives to its first nodes. Then 8 bytes for each node:
    token id and count.
    """
    if not reply:
        return NOTHING
    nodes = struct.unpack_from(f"<{(len(reply) - HEADER) // 4}I", reply, HEADER)
    offsets = _parent_offsets(reply[2], reply[3:HEADER])
    return Continuation(reply[0], SOURCES[reply[1]], offsets, nodes[0::2], nodes[1::2])
