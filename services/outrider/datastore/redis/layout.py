"""The layout of the data in Redis: keys, fields and values. Only ngrams.lua knows it, too.

Names (T tokenizer, C corpus, X tenant, S session) are percent-encoded, so that none can reach into another's scope.
Every key but the last one begins with `outrider:2:{T:C}:`. The last one rules out a Redis Cluster: a load writes it and
its prior in one transaction, and they would be on two servers.

    key                        type    lives   content
    prior:X                    hash    always  n-gram -> followers. X is empty for the prior of all tenants
    prior:X:documents          string  always  the corpus itself, compressed: `packed_documents`
    prior:X:info               hash    always  version (new with each load), num_tokens, num_ngrams
    prior:X:changes            stream  always  version, of what was loaded; empty = deleted. The last few
    loading:UUID               hash    10 min  a prior on its way in; renamed to prior:X at the end
    loading:UUID:documents     string  10 min  likewise
    s:X:S:tokens               string  session the stream so far, 4 bytes a token: its length is the position
    s:X:S:dynamic              hash    session n-gram -> followers, of the session's own stream
    s:X:S:rejected             hash    session n-gram of refused drafts -> followers
    t:X:shared, g:shared       hash    shared  n-gram -> followers, of a tenant's contributing sessions, or of all
    t:X:changes, g:changes     stream  shared  context, tokens: what was added to the shared tier. The last few thousand
    t:X:ring, g:ring           stream  shared  end, open, tokens: the streams of ended sessions, one entry a document

    outrider:2:corpora         set     always  T:C:X of every prior. An index: what has no info does not exist

*session*: session_ttl_s after the last record; *shared*: shared_ttl_s after the last write. Only priors live for ever:
the policy volatile-lfu evicts keys that expire, the least used first, and never a key that does not.

Token ids are 4 bytes, counts are 4 bytes, both little-endian. An n-gram is its tokens. Followers are token id and
count, the most counted first, then the latest. The `end` of a ring's entry is the number of tokens that were ever
added, itself included: the number of tokens in a ring is the end of its last entry less the beginning of its first. A
document of more than RING_ENTRY_TOKENS is several entries, all but the last `open`.

The number in the names is the version of the layout and the Functions: servers of two versions can share a Redis.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import FANOUT, NOTHING, Continuation, TokenId
from outrider.datastore.types import CorpusId, Scope

ROOT = "outrider:2:"
CORPORA = ROOT + "corpora"
LIBRARY = "outrider_ngrams_4"

# Redis serves no other caller during a command or a Function call: these limits bound its duration.
TOKENS_PER_CALL = 64
"""Tokens learned in one call."""
REJECTIONS_PER_CALL = 16
"""Refused drafts learned in one call."""
CONTEXTS_PER_CALL = 16
"""Contexts looked up in one call."""
FIELDS_PER_CALL = 512
"""N-grams of a prior stored in one command."""

RING_ENTRY_TOKENS = 65_536
"""Most tokens in one entry of a ring."""
LOADING_TTL_S = 600
"""Time after which a prior whose loading stopped halfway is deleted."""
NUM_PRIOR_CHANGES = 16
"""Entries kept of a prior's changes."""


class PriorKeys(NamedTuple):
    """Keys of one prior, in the order that the Functions expect."""

    ngrams: str
    documents: str
    info: str
    changes: str


class SessionKeys(NamedTuple):
    """Keys of one session, in the order that the Functions expect."""

    tokens: str
    dynamic: str
    rejected: str


class SharedKeys(NamedTuple):
    """Keys of the data that the sessions of a tenant, or of all tenants, share."""

    ngrams: str
    changes: str
    ring: str


def _quoted(name: str) -> str:
    return quote(name, safe="")


@lru_cache(4096)
def tag(tokenizer_hash: str, corpus: str) -> str:
    """Returns the beginning of the keys of a corpus."""
    return f"{ROOT}{{{_quoted(tokenizer_hash)}:{_quoted(corpus)}}}:"


def prior_key(corpus: CorpusId) -> str:
    """Returns the key of a prior's n-grams; its other keys begin with it."""
    return f"{tag(corpus.tokenizer_hash, corpus.corpus)}prior:{_quoted(corpus.tenant)}"


def prior_keys(corpus: CorpusId) -> PriorKeys:
    """Returns all keys of a prior."""
    prior = prior_key(corpus)
    return PriorKeys(prior, prior + ":documents", prior + ":info", prior + ":changes")


def loading_key(corpus: CorpusId, name: str) -> str:
    """Returns the key of a prior on its way in."""
    return f"{tag(corpus.tokenizer_hash, corpus.corpus)}loading:{name}"


def session_keys(scope: Scope) -> SessionKeys:
    """Returns the keys of the scope's session."""
    session = f"{tag(scope.tokenizer_hash, scope.corpus)}s:{_quoted(scope.tenant)}:{_quoted(scope.session_id)}:"
    return SessionKeys(session + "tokens", session + "dynamic", session + "rejected")


def shared_keys(scope: Scope) -> SharedKeys | None:
    """Returns the keys of what the scope shares, or None for the scope of one session."""
    if scope.retrieval_scope is RetrievalScope.SESSION:
        return None
    owner = "g:" if scope.retrieval_scope is RetrievalScope.GLOBAL else f"t:{_quoted(scope.tenant)}:"
    shared = tag(scope.tokenizer_hash, scope.corpus) + owner
    return SharedKeys(shared + "shared", shared + "changes", shared + "ring")


def corpus_entry(corpus: CorpusId) -> str:
    """Returns the member of `corpora` that names a prior."""
    return f"{_quoted(corpus.tokenizer_hash)}:{_quoted(corpus.corpus)}:{_quoted(corpus.tenant)}"


def corpus_of(entry: bytes) -> CorpusId:
    """Returns the prior that a member of `corpora` names."""
    # Always three parts: a colon in a name is percent-encoded.
    return CorpusId(*(unquote(part) for part in entry.decode().split(":")))


# Called to find out whether lookups and records work: the second counts as a write, and writes nothing.
CHECK = ROOT + "check"
"""A key that never exists."""
LOOKUP_CHECK = ("FCALL_RO", "outrider_lookup_4", 2, CHECK, CHECK, "00", 1, 1, 1, "00")
LOOKUP_CHECK_REPLY = [b""]
RECORD_CHECK = ("FCALL", "outrider_end_session_4", 3, CHECK, CHECK, CHECK, 0)
RECORD_CHECK_REPLY = 0


def pack(token_ids: Sequence[TokenId]) -> bytes:
    """Returns 4 bytes a token."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack(tokens: bytes | memoryview) -> array[TokenId]:
    """Returns the tokens of `pack`. They stay an array: a list would take ten times the memory."""
    # Through numpy, since what is stored is little-endian and an array has the byte order of this machine.
    return array("i", np.frombuffer(tokens, "<i4").astype(np.intc).tobytes())


def packed_documents(documents: Iterable[Sequence[TokenId]]) -> bytes:
    """Returns a corpus as one string: the length and the tokens of each document, 4 bytes each, compressed by zlib."""
    # Level 1 takes 0.15 s for a million tokens and leaves 45 % of their bytes; level 6 takes 1.1 s and leaves 41 %.
    compress = zlib.compressobj(1)
    pieces = []
    for document in documents:
        pieces.append(compress.compress(struct.pack("<I", len(document))))
        pieces.append(compress.compress(np.asarray(document, "<i4").tobytes()))
    return b"".join([*pieces, compress.flush()])


def unpacked_documents(packed: bytes) -> tuple[array[TokenId], ...]:
    """Returns the documents of `packed_documents`."""
    documents = []
    data = memoryview(zlib.decompress(packed))
    start = 0
    while start < len(data):
        (length,) = struct.unpack_from("<I", data, start)
        stop = start + 4 + 4 * length
        documents.append(unpack(data[start + 4 : stop]))
        start = stop
    return tuple(documents)


SOURCES = {source.value: source for source in Source}
MAX_NUMBER = 2**31 - 1
"""Largest token id, count or position that a message can hold."""
NUM_HEADER_BYTES = 3 + len(FANOUT)


def position_from(reply: int) -> int:
    """Returns the position of a session, as the Functions that write reply it. Raises ValueError for an invalid one."""
    if not 0 <= reply <= MAX_NUMBER:
        raise ValueError(f"a position is {reply}")
    return reply


def continuation_from(reply: bytes) -> Continuation:
    """Reads the answer of the lookup Function to one context. Empty means that nothing was found.

    One byte each: match length, tier, nodes of the chain, alternatives to its first nodes. Then 8 bytes for each node:
    token id and count. Raises ValueError, TypeError, LookupError or struct.error for a
    reply of another shape.
    """
    if not reply:
        return NOTHING
    nodes = struct.unpack_from(f"<{(len(reply) - NUM_HEADER_BYTES) // 4}I", reply, NUM_HEADER_BYTES)
    if max(nodes, default=0) > MAX_NUMBER:
        raise ValueError(f"a token id or a count is {max(nodes)}")
    offsets = _parent_offsets(reply[2], reply[3:NUM_HEADER_BYTES])
    return Continuation(reply[0], SOURCES[reply[1]], offsets, nodes[0::2], nodes[1::2])


@lru_cache(4096)
def _parent_offsets(chain_len: int, num_alternatives: bytes) -> tuple[int, ...]:
    """Returns the offsets of a chain's nodes, then those of the alternatives to its first nodes, in order of depth."""
    offsets = [min(index, 1) for index in range(chain_len)]
    for depth, number in enumerate(num_alternatives):
        for _ in range(number):
            # Nodes count from 1: this is the next one. Its parent is node number `depth` of the chain, or none.
            offsets.append(len(offsets) + 1 - depth if depth else 0)
    return tuple(offsets)
