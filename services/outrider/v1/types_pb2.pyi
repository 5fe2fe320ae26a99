from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    METHOD_OFF: _ClassVar[Method]
    METHOD_SPECULATIVE: _ClassVar[Method]
    METHOD_PEARL: _ClassVar[Method]
    METHOD_RETRIEVAL: _ClassVar[Method]

class RetrievalScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETRIEVAL_SCOPE_UNSPECIFIED: _ClassVar[RetrievalScope]
    RETRIEVAL_SCOPE_SESSION: _ClassVar[RetrievalScope]
    RETRIEVAL_SCOPE_TENANT: _ClassVar[RetrievalScope]
    RETRIEVAL_SCOPE_GLOBAL: _ClassVar[RetrievalScope]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_TARGET: _ClassVar[Source]
    SOURCE_DRAFT: _ClassVar[Source]
    SOURCE_PRIOR: _ClassVar[Source]
    SOURCE_DYNAMIC: _ClassVar[Source]
    SOURCE_REJECTED: _ClassVar[Source]
    SOURCE_SHARED: _ClassVar[Source]
    SOURCE_RING: _ClassVar[Source]
METHOD_UNSPECIFIED: Method
METHOD_OFF: Method
METHOD_SPECULATIVE: Method
METHOD_PEARL: Method
METHOD_RETRIEVAL: Method
RETRIEVAL_SCOPE_UNSPECIFIED: RetrievalScope
RETRIEVAL_SCOPE_SESSION: RetrievalScope
RETRIEVAL_SCOPE_TENANT: RetrievalScope
RETRIEVAL_SCOPE_GLOBAL: RetrievalScope
SOURCE_UNSPECIFIED: Source
SOURCE_TARGET: Source
SOURCE_DRAFT: Source
SOURCE_PRIOR: Source
SOURCE_DYNAMIC: Source
SOURCE_REJECTED: Source
SOURCE_SHARED: Source
SOURCE_RING: Source

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("method", "num_speculative_tokens", "lookahead", "min_path_probability", "retrieval", "retrieval_params")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_PARAMS_FIELD_NUMBER: _ClassVar[int]
    method: Method
    num_speculative_tokens: int
    lookahead: int
    min_path_probability: float
    retrieval: bool
    retrieval_params: RetrievalParams
    def __init__(self, method: _Optional[_Union[Method, str]] = ..., num_speculative_tokens: _Optional[int] = ..., lookahead: _Optional[int] = ..., min_path_probability: _Optional[float] = ..., retrieval: _Optional[bool] = ..., retrieval_params: _Optional[_Union[RetrievalParams, _Mapping]] = ...) -> None: ...

class RetrievalParams(_message.Message):
    __slots__ = ("scope", "contribute")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    scope: RetrievalScope
    contribute: bool
    def __init__(self, scope: _Optional[_Union[RetrievalScope, str]] = ..., contribute: _Optional[bool] = ...) -> None: ...

class SourceCount(_message.Message):
    __slots__ = ("source", "num_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: Source
    num_tokens: int
    def __init__(self, source: _Optional[_Union[Source, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("base_len", "token_ids")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("base_len", "first_node_id", "parent_offsets", "token_ids", "costs", "source")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    first_node_id: int
    parent_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    costs: _containers.RepeatedScalarFieldContainer[int]
    source: Source
    def __init__(self, base_len: _Optional[int] = ..., first_node_id: _Optional[int] = ..., parent_offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., costs: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[Source, str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "tokenizer_hash", "vocab_size", "max_context_len", "eos_token_ids")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_id: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Handshake(_message.Message):
    __slots__ = ("protocol_version", "tokenizer_hash", "vocab_size", "model_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    tokenizer_hash: str
    vocab_size: int
    model_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., model_id: _Optional[str] = ...) -> None: ...
