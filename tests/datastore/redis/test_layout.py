"""Keys and values as earlier releases wrote them: any change needs another version number in the names."""

from __future__ import annotations

import struct
import zlib
from array import array

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation
from outrider.datastore.redis import layout
from outrider.datastore.types import ALL_TENANTS, CorpusId, Scope

TAG = "outrider:2:{a%3Ab:c%7D%C3%A9}:"
SCOPE = Scope("a:b", "s/1", "c}é", "t 1", RetrievalScope.TENANT)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def test_the_keys_of_a_prior():
    assert layout.prior_keys(SCOPE.corpus_id("t 1")) == (
        TAG + "prior:t%201",
        TAG + "prior:t%201:documents",
        TAG + "prior:t%201:info",
        TAG + "prior:t%201:changes",
    )
    assert layout.prior_key(SCOPE.corpus_id(ALL_TENANTS)) == TAG + "prior:"
    assert layout.loading_key(SCOPE.corpus_id("t 1"), "x") == TAG + "loading:x"


def test_the_keys_of_a_session():
    session = TAG + "s:t%201:s%2F1:"
    assert layout.session_keys(SCOPE) == (session + "tokens", session + "dynamic", session + "rejected")


def test_the_keys_of_what_sessions_share():
    keys = layout.shared_keys(SCOPE)
    assert keys == (TAG + "t:t%201:shared", TAG + "t:t%201:changes", TAG + "t:t%201:ring")
    everyone = Scope("a:b", "s/1", "c}é", "t 1", RetrievalScope.GLOBAL)
    assert layout.shared_keys(everyone) == (TAG + "g:shared", TAG + "g:changes", TAG + "g:ring")
    assert layout.shared_keys(Scope("a:b", "s/1")) is None


def test_the_index_of_corpora_names_each_prior():
    corpus = CorpusId("a:b", "c}é", "t 1")
    assert layout.corpus_entry(corpus) == "a%3Ab:c%7D%C3%A9:t%201"
    assert layout.corpus_of(b"a%3Ab:c%7D%C3%A9:t%201") == corpus
    assert layout.corpus_of(b"a:default:") == CorpusId("a", "default", ALL_TENANTS)


def test_tokens_are_four_bytes_little_endian():
    assert layout.pack([1, 258, 2**31 - 1]) == bytes.fromhex("01000000 02010000 ffffff7f")


@given(token_ids)
def test_packed_tokens_are_unpacked(token_ids):
    assert layout.unpack(layout.pack(token_ids)) == array("i", token_ids)


def test_documents_are_lengths_and_tokens_compressed():
    packed = layout.packed_documents([[1, 2], [3]])
    assert zlib.decompress(packed) == struct.pack("<5I", 2, 1, 2, 1, 3)


@given(st.lists(token_ids, max_size=5))
def test_packed_documents_are_unpacked(documents):
    packed = layout.packed_documents(documents)
    assert layout.unpacked_documents(packed) == tuple(array("i", document) for document in documents)


def test_a_reply_is_a_chain_and_the_alternatives_to_its_first_nodes():
    # Match length 2, tier DYNAMIC; a chain of three nodes, one alternative to the first of them, two to the second.
    header = bytes([2, Source.DYNAMIC.value, 3, 1, 2])
    nodes = [(10, 5), (11, 4), (12, 3), (20, 2), (21, 2), (22, 1)]
    reply = header + b"".join(struct.pack("<II", *node) for node in nodes)
    assert layout.continuation_from(reply) == Continuation(
        2, Source.DYNAMIC, (0, 1, 1, 0, 4, 5), (10, 11, 12, 20, 21, 22), (5, 4, 3, 2, 2, 1)
    )
    assert layout.continuation_from(b"") == NOTHING
