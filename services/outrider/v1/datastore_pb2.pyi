from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scope(_message.Message):
    __slots__ = ("tokenizer_hash", "session_id", "corpus")
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    session_id: str
    corpus: str
    def __init__(self, tokenizer_hash: _Optional[str] = ..., session_id: _Optional[str] = ..., corpus: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("scope", "queries", "max_match_len", "max_continuation_len")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUATION_LEN_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    max_match_len: int
    max_continuation_len: int
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., max_match_len: _Optional[int] = ..., max_continuation_len: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[LookupResult]
    def __init__(self, results: _Optional[_Iterable[_Union[LookupResult, _Mapping]]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("scope", "accepted_token_ids", "rejections", "end_session")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    accepted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    end_session: bool
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., accepted_token_ids: _Optional[_Iterable[int]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ..., end_session: _Optional[bool] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("context_token_ids", "rejected_token_ids", "continuation_token_ids")
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rejected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    continuation_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context_token_ids: _Optional[_Iterable[int]] = ..., rejected_token_ids: _Optional[_Iterable[int]] = ..., continuation_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("num_accepted_tokens", "num_rejections")
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    num_accepted_tokens: int
    num_rejections: int
    def __init__(self, num_accepted_tokens: _Optional[int] = ..., num_rejections: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("scope",)
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("accepted_token_ids", "rejections")
    ACCEPTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    accepted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    def __init__(self, accepted_token_ids: _Optional[_Iterable[int]] = ..., rejections: _Optional[_Iterable[_Union[Rejection, _Mapping]]] = ...) -> None: ...

class LoadPriorRequest(_message.Message):
    __slots__ = ("scope", "documents")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    documents: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, scope: _Optional[_Union[Scope, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadPriorResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class ListCorporaRequest(_message.Message):
    __slots__ = ("tokenizer_hash",)
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    def __init__(self, tokenizer_hash: _Optional[str] = ...) -> None: ...

class CorpusInfo(_message.Message):
    __slots__ = ("tokenizer_hash", "corpus", "num_tokens")
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_hash: str
    corpus: str
    num_tokens: int
    def __init__(self, tokenizer_hash: _Optional[str] = ..., corpus: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("store", "max_match_len", "max_continuation_len", "num_lookups", "num_hits", "version")
    STORE_FIELD_NUMBER: _ClassVar[int]
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUATION_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    store: str
    max_match_len: int
    max_continuation_len: int
    num_lookups: int
    num_hits: int
    version: str
    def __init__(self, store: _Optional[str] = ..., max_match_len: _Optional[int] = ..., max_continuation_len: _Optional[int] = ..., num_lookups: _Optional[int] = ..., num_hits: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...
