from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scope(_message.Message):
    __slots__ = ("tokenizer_hash", "session_id", "corpus", "tenant", "retrieval_scope", "contribute", "vocab_size")
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_SCOPE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    session_id: str
    corpus: str
    tenant: str
    retrieval_scope: _types_pb2.RetrievalScope
    contribute: bool
    vocab_size: int
    def __init__(self, tokenizer_hash: _Optional[str] = ..., session_id: _Optional[str] = ..., corpus: _Optional[str] = ..., tenant: _Optional[str] = ..., retrieval_scope: _Optional[_Union[_types_pb2.RetrievalScope, str]] = ..., contribute: _Optional[bool] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("query_id", "base_len", "context_token_ids")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    base_len: int
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, query_id: _Optional[int] = ..., base_len: _Optional[int] = ..., context_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("scope", "queries", "max_match_len", "max_continuation_len", "tiers", "traceparent", "whole_runs")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUATION_LEN_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_RUNS_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    max_match_len: int
    max_continuation_len: int
    tiers: _containers.RepeatedScalarFieldContainer[_types_pb2.Source]
    traceparent: str
    whole_runs: bool
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., max_match_len: _Optional[int] = ..., max_continuation_len: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_types_pb2.Source, str]]] = ..., traceparent: _Optional[str] = ..., whole_runs: _Optional[bool] = ...) -> None: ...

class LookupResult(_message.Message):
    __slots__ = ("query_id", "base_len", "match_len", "tier", "parent_offsets", "token_ids", "counts")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PARENT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    base_len: int
    match_len: int
    tier: _types_pb2.Source
    parent_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, query_id: _Optional[int] = ..., base_len: _Optional[int] = ..., match_len: _Optional[int] = ..., tier: _Optional[_Union[_types_pb2.Source, str]] = ..., parent_offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("results", "is_local")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[LookupResult]
    is_local: bool
    def __init__(self, results: _Optional[_Iterable[_Union[LookupResult, _Mapping]]] = ..., is_local: _Optional[bool] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("scope", "accepted_token_ids", "rejections", "end_session", "base_len", "accepted_by_tier", "traceparent")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    accepted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    end_session: bool
    base_len: int
    accepted_by_tier: _containers.RepeatedCompositeFieldContainer[_types_pb2.SourceCount]
    traceparent: str
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., accepted_token_ids: _Optional[_Iterable[int]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., end_session: _Optional[bool] = ..., base_len: _Optional[int] = ..., accepted_by_tier: _Optional[_Iterable[_Union[_types_pb2.SourceCount, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("context_token_ids", "rejected_token_ids")
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rejected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context_token_ids: _Optional[_Iterable[int]] = ..., rejected_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("session_id", "num_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    num_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("scope",)
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("prior", "shared")
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    prior: PriorPiece
    shared: SharedRun
    def __init__(self, prior: _Optional[_Union[PriorPiece, _Mapping]] = ..., shared: _Optional[_Union[SharedRun, _Mapping]] = ...) -> None: ...

class PriorPiece(_message.Message):
    __slots__ = ("is_first", "is_last", "documents", "is_open")
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    is_first: bool
    is_last: bool
    documents: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    is_open: bool
    def __init__(self, is_first: _Optional[bool] = ..., is_last: _Optional[bool] = ..., documents: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., is_open: _Optional[bool] = ...) -> None: ...

class SharedRun(_message.Message):
    __slots__ = ("context_token_ids", "token_ids")
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadPriorRequest(_message.Message):
    __slots__ = ("scope", "documents", "num_tokens")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    documents: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    num_tokens: int
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadPriorResponse(_message.Message):
    __slots__ = ("num_tokens", "num_ngrams", "num_stored_ngrams", "is_done")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NGRAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_NGRAMS_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_ngrams: int
    num_stored_ngrams: int
    is_done: bool
    def __init__(self, num_tokens: _Optional[int] = ..., num_ngrams: _Optional[int] = ..., num_stored_ngrams: _Optional[int] = ..., is_done: _Optional[bool] = ...) -> None: ...

class ListCorporaRequest(_message.Message):
    __slots__ = ("tokenizer_hash",)
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    def __init__(self, tokenizer_hash: _Optional[str] = ...) -> None: ...

class CorpusInfo(_message.Message):
    __slots__ = ("tokenizer_hash", "corpus", "num_tokens", "tenant", "num_ngrams")
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_NGRAMS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    corpus: str
    num_tokens: int
    tenant: str
    num_ngrams: int
    def __init__(self, tokenizer_hash: _Optional[str] = ..., corpus: _Optional[str] = ..., num_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., num_ngrams: _Optional[int] = ...) -> None: ...

class ListCorporaResponse(_message.Message):
    __slots__ = ("corpora",)
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    corpora: _containers.RepeatedCompositeFieldContainer[CorpusInfo]
    def __init__(self, corpora: _Optional[_Iterable[_Union[CorpusInfo, _Mapping]]] = ...) -> None: ...

class DeleteCorpusRequest(_message.Message):
    __slots__ = ("scope",)
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ...) -> None: ...

class DeleteCorpusResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatastoreServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatastoreServiceGetInfoResponse(_message.Message):
    __slots__ = ("store", "max_match_len", "max_continuation_len", "num_lookups", "num_hits", "version", "max_ring_match_len", "tiers", "num_local_lookups", "used_memory_bytes", "max_memory_bytes", "num_evicted_keys", "rings", "store_error")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUATION_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_RING_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    USED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_KEYS_FIELD_NUMBER: _ClassVar[int]
    RINGS_FIELD_NUMBER: _ClassVar[int]
    STORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    store: str
    max_match_len: int
    max_continuation_len: int
    num_lookups: int
    num_hits: int
    version: str
    max_ring_match_len: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierInfo]
    num_local_lookups: int
    used_memory_bytes: int
    max_memory_bytes: int
    num_evicted_keys: int
    rings: _containers.RepeatedCompositeFieldContainer[RingInfo]
    store_error: str
    def __init__(self, store: _Optional[str] = ..., max_match_len: _Optional[int] = ..., max_continuation_len: _Optional[int] = ..., num_lookups: _Optional[int] = ..., num_hits: _Optional[int] = ..., version: _Optional[str] = ..., max_ring_match_len: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierInfo, _Mapping]]] = ..., num_local_lookups: _Optional[int] = ..., used_memory_bytes: _Optional[int] = ..., max_memory_bytes: _Optional[int] = ..., num_evicted_keys: _Optional[int] = ..., rings: _Optional[_Iterable[_Union[RingInfo, _Mapping]]] = ..., store_error: _Optional[str] = ...) -> None: ...

class TierInfo(_message.Message):
    __slots__ = ("tier", "num_hits", "num_matched_tokens", "num_accepted_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _types_pb2.Source
    num_hits: int
    num_matched_tokens: int
    num_accepted_tokens: int
    def __init__(self, tier: _Optional[_Union[_types_pb2.Source, str]] = ..., num_hits: _Optional[int] = ..., num_matched_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class RingInfo(_message.Message):
    __slots__ = ("tenant", "num_tokens", "num_indexed_tokens", "build_ms", "tokenizer_hash", "corpus")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUILD_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_tokens: int
    num_indexed_tokens: int
    build_ms: float
    tokenizer_hash: str
    corpus: str
    def __init__(self, tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_indexed_tokens: _Optional[int] = ..., build_ms: _Optional[float] = ..., tokenizer_hash: _Optional[str] = ..., corpus: _Optional[str] = ...) -> None: ...
