from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpeculateRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("number", "open", "commit", "steering", "close")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STEERING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    open: SpeculateOpen
    commit: _types_pb2.Commit
    steering: _types_pb2.Steering
    close: SpeculateClose
    def __init__(self, number: _Optional[int] = ..., open: _Optional[_Union[SpeculateOpen, _Mapping]] = ..., commit: _Optional[_Union[_types_pb2.Commit, _Mapping]] = ..., steering: _Optional[_Union[_types_pb2.Steering, _Mapping]] = ..., close: _Optional[_Union[SpeculateClose, _Mapping]] = ...) -> None: ...

class SpeculateOpen(_message.Message):
    __slots__ = ("handshake", "session_id", "committed_token_ids", "num_prompt_tokens", "sampling", "speculation", "max_forward_us", "prefix_salt", "structured_outputs", "traceparent")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    MAX_FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    handshake: _types_pb2.Handshake
    session_id: str
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _types_pb2.SamplingParams
    speculation: _types_pb2.SpeculationParams
    max_forward_us: int
    prefix_salt: str
    structured_outputs: _types_pb2.StructuredOutputs
    traceparent: str
    def __init__(self, handshake: _Optional[_Union[_types_pb2.Handshake, _Mapping]] = ..., session_id: _Optional[str] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationParams, _Mapping]] = ..., max_forward_us: _Optional[int] = ..., prefix_salt: _Optional[str] = ..., structured_outputs: _Optional[_Union[_types_pb2.StructuredOutputs, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SpeculateClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionResponse]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionResponse, _Mapping]]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("number", "opened", "draft", "ended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    opened: SpeculateOpened
    draft: SpeculatorDraft
    ended: SpeculateEnded
    def __init__(self, number: _Optional[int] = ..., opened: _Optional[_Union[SpeculateOpened, _Mapping]] = ..., draft: _Optional[_Union[SpeculatorDraft, _Mapping]] = ..., ended: _Optional[_Union[SpeculateEnded, _Mapping]] = ...) -> None: ...

class SpeculateOpened(_message.Message):
    __slots__ = ("model", "forward_us", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    forward_us: int
    load: SpeculatorLoad
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., forward_us: _Optional[int] = ..., load: _Optional[_Union[SpeculatorLoad, _Mapping]] = ...) -> None: ...

class SpeculatorLoad(_message.Message):
    __slots__ = ("num_sessions", "max_num_sessions", "busy_percent")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    max_num_sessions: int
    busy_percent: int
    def __init__(self, num_sessions: _Optional[int] = ..., max_num_sessions: _Optional[int] = ..., busy_percent: _Optional[int] = ...) -> None: ...

class SpeculatorDraft(_message.Message):
    __slots__ = ("draft", "forward_us", "retrieval_us", "load")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_US_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    draft: _types_pb2.Draft
    forward_us: int
    retrieval_us: int
    load: SpeculatorLoad
    def __init__(self, draft: _Optional[_Union[_types_pb2.Draft, _Mapping]] = ..., forward_us: _Optional[int] = ..., retrieval_us: _Optional[int] = ..., load: _Optional[_Union[SpeculatorLoad, _Mapping]] = ...) -> None: ...

class SpeculateEnded(_message.Message):
    __slots__ = ("code", "message", "status")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    status: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., status: _Optional[bytes] = ...) -> None: ...

class SpeculatorServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpeculatorServiceGetInfoResponse(_message.Message):
    __slots__ = ("model", "methods", "max_num_sessions", "num_sessions", "version", "busy_percent")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    methods: _containers.RepeatedScalarFieldContainer[_types_pb2.Method]
    max_num_sessions: int
    num_sessions: int
    version: str
    busy_percent: int
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[_types_pb2.Method, str]]] = ..., max_num_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ..., version: _Optional[str] = ..., busy_percent: _Optional[int] = ...) -> None: ...
