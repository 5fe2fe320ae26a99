from outrider.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROBS_MODE_UNSPECIFIED: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_RAW_LOGPROBS: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_RAW_LOGITS: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED_LOGPROBS: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED_LOGITS: _ClassVar[LogprobsMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]

class Peer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_UNSPECIFIED: _ClassVar[Peer]
    PEER_SPECULATOR: _ClassVar[Peer]
    PEER_DATASTORE: _ClassVar[Peer]
    PEER_EDGE: _ClassVar[Peer]

class Absence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABSENCE_UNSPECIFIED: _ClassVar[Absence]
    ABSENCE_STARTING: _ClassVar[Absence]
    ABSENCE_UNREACHABLE: _ClassVar[Absence]
    ABSENCE_LOST: _ClassVar[Absence]
    ABSENCE_SLOW: _ClassVar[Absence]
    ABSENCE_FULL: _ClassVar[Absence]
    ABSENCE_UNUSABLE: _ClassVar[Absence]
LOGPROBS_MODE_UNSPECIFIED: LogprobsMode
LOGPROBS_MODE_RAW_LOGPROBS: LogprobsMode
LOGPROBS_MODE_RAW_LOGITS: LogprobsMode
LOGPROBS_MODE_PROCESSED_LOGPROBS: LogprobsMode
LOGPROBS_MODE_PROCESSED_LOGITS: LogprobsMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason
PEER_UNSPECIFIED: Peer
PEER_SPECULATOR: Peer
PEER_DATASTORE: Peer
PEER_EDGE: Peer
ABSENCE_UNSPECIFIED: Absence
ABSENCE_STARTING: Absence
ABSENCE_UNREACHABLE: Absence
ABSENCE_LOST: Absence
ABSENCE_SLOW: Absence
ABSENCE_FULL: Absence
ABSENCE_UNUSABLE: Absence

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_call_id", "tool_calls")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "definition")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    definition: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., definition: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template_kwargs: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _types_pb2.TokenIds
    chat: ChatMessages
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "sampling", "speculation", "resume_token_ids", "report", "truncate_prompt_tokens", "structured_outputs", "n", "resume_choices", "skip_special_tokens", "clamp_max_tokens", "prediction")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    RESUME_CHOICES_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLAMP_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    sampling: _types_pb2.SamplingParams
    speculation: _types_pb2.SpeculationParams
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    report: ReportParams
    truncate_prompt_tokens: int
    structured_outputs: _types_pb2.StructuredOutputs
    n: int
    resume_choices: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    skip_special_tokens: bool
    clamp_max_tokens: bool
    prediction: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[_types_pb2.SpeculationParams, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., report: _Optional[_Union[ReportParams, _Mapping]] = ..., truncate_prompt_tokens: _Optional[int] = ..., structured_outputs: _Optional[_Union[_types_pb2.StructuredOutputs, _Mapping]] = ..., n: _Optional[int] = ..., resume_choices: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., skip_special_tokens: _Optional[bool] = ..., clamp_max_tokens: _Optional[bool] = ..., prediction: _Optional[str] = ...) -> None: ...

class ResumedChoice(_message.Message):
    __slots__ = ("token_ids", "is_finished")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_finished: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., is_finished: _Optional[bool] = ...) -> None: ...

class ReportParams(_message.Message):
    __slots__ = ("logprobs", "prompt_logprobs", "logprobs_mode", "echo", "rounds", "text_ends", "trees")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    logprobs: int
    prompt_logprobs: int
    logprobs_mode: LogprobsMode
    echo: bool
    rounds: bool
    text_ends: bool
    trees: bool
    def __init__(self, logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprobs_mode: _Optional[_Union[LogprobsMode, str]] = ..., echo: _Optional[bool] = ..., rounds: _Optional[bool] = ..., text_ends: _Optional[bool] = ..., trees: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished", "waiting", "prompt_logprobs", "reading", "index")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    waiting: Waiting
    prompt_logprobs: PromptLogprobs
    reading: Reading
    index: int
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("num_waiting",)
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    def __init__(self, num_waiting: _Optional[int] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("num_read_tokens", "num_tokens")
    NUM_READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_read_tokens: int
    num_tokens: int
    def __init__(self, num_read_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "seed", "num_prompt_tokens", "prompt_token_ids", "model", "prompt_text", "load", "prompt_text_ends")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    seed: int
    num_prompt_tokens: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: _types_pb2.ModelInfo
    prompt_text: str
    load: VerifierLoad
    prompt_text_ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., seed: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., prompt_text: _Optional[str] = ..., load: _Optional[_Union[VerifierLoad, _Mapping]] = ..., prompt_text_ends: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifierLoad(_message.Message):
    __slots__ = ("num_sessions", "max_num_sessions", "num_queued")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    max_num_sessions: int
    num_queued: int
    def __init__(self, num_sessions: _Optional[int] = ..., max_num_sessions: _Optional[int] = ..., num_queued: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("token_ids", "sources", "text", "num_drafted", "acknowledged_node_id", "logprobs", "round", "text_ends")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[_types_pb2.Source]
    text: str
    num_drafted: int
    acknowledged_node_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    round: RoundReport
    text_ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[_Union[_types_pb2.Source, str]]] = ..., text: _Optional[str] = ..., num_drafted: _Optional[int] = ..., acknowledged_node_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., round: _Optional[_Union[RoundReport, _Mapping]] = ..., text_ends: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("method", "drafted_by_source", "num_accepted_tokens", "num_forward_rows", "times", "tree")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARD_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    method: _types_pb2.Method
    drafted_by_source: _containers.RepeatedCompositeFieldContainer[_types_pb2.SourceCount]
    num_accepted_tokens: int
    num_forward_rows: int
    times: RoundTimes
    tree: VerifiedTree
    def __init__(self, method: _Optional[_Union[_types_pb2.Method, str]] = ..., drafted_by_source: _Optional[_Iterable[_Union[_types_pb2.SourceCount, _Mapping]]] = ..., num_accepted_tokens: _Optional[int] = ..., num_forward_rows: _Optional[int] = ..., times: _Optional[_Union[RoundTimes, _Mapping]] = ..., tree: _Optional[_Union[VerifiedTree, _Mapping]] = ...) -> None: ...

class VerifiedTree(_message.Message):
    __slots__ = ("parents", "token_ids", "costs", "sources")
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    costs: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[_types_pb2.Source]
    def __init__(self, parents: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., costs: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[_Union[_types_pb2.Source, str]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "num_prompt_tokens", "num_output_tokens", "summary", "stop_string", "num_cached_prompt_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    num_prompt_tokens: int
    num_output_tokens: int
    summary: SpeculationSummary
    stop_string: str
    num_cached_prompt_tokens: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., summary: _Optional[_Union[SpeculationSummary, _Mapping]] = ..., stop_string: _Optional[str] = ..., num_cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class SpeculationSummary(_message.Message):
    __slots__ = ("method", "num_rounds", "num_drafted_tokens", "num_accepted_tokens", "num_empty_rounds", "num_hits", "accepted_by_source", "num_speculator_losses", "degraded", "times_p50", "requested_method", "decisions", "num_bytes_sent", "num_bytes_received", "num_ready_hits", "num_tail_tokens", "num_draft_forwards", "num_phrase_tokens", "num_draft_rows", "num_withheld_nodes", "speculative_decoding", "missing_peers")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMPTY_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATOR_LOSSES_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    TIMES_P50_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_METHOD_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PHRASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHHELD_NODES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_DECODING_FIELD_NUMBER: _ClassVar[int]
    MISSING_PEERS_FIELD_NUMBER: _ClassVar[int]
    method: _types_pb2.Method
    num_rounds: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_empty_rounds: int
    num_hits: int
    accepted_by_source: _containers.RepeatedCompositeFieldContainer[_types_pb2.SourceCount]
    num_speculator_losses: int
    degraded: bool
    times_p50: RoundTimes
    requested_method: _types_pb2.Method
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    num_bytes_sent: int
    num_bytes_received: int
    num_ready_hits: int
    num_tail_tokens: int
    num_draft_forwards: int
    num_phrase_tokens: int
    num_draft_rows: int
    num_withheld_nodes: int
    speculative_decoding: SpeculativeDecodingMetrics
    missing_peers: _containers.RepeatedCompositeFieldContainer[MissingPeer]
    def __init__(self, method: _Optional[_Union[_types_pb2.Method, str]] = ..., num_rounds: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_empty_rounds: _Optional[int] = ..., num_hits: _Optional[int] = ..., accepted_by_source: _Optional[_Iterable[_Union[_types_pb2.SourceCount, _Mapping]]] = ..., num_speculator_losses: _Optional[int] = ..., degraded: _Optional[bool] = ..., times_p50: _Optional[_Union[RoundTimes, _Mapping]] = ..., requested_method: _Optional[_Union[_types_pb2.Method, str]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., num_bytes_sent: _Optional[int] = ..., num_bytes_received: _Optional[int] = ..., num_ready_hits: _Optional[int] = ..., num_tail_tokens: _Optional[int] = ..., num_draft_forwards: _Optional[int] = ..., num_phrase_tokens: _Optional[int] = ..., num_draft_rows: _Optional[int] = ..., num_withheld_nodes: _Optional[int] = ..., speculative_decoding: _Optional[_Union[SpeculativeDecodingMetrics, _Mapping]] = ..., missing_peers: _Optional[_Iterable[_Union[MissingPeer, _Mapping]]] = ...) -> None: ...

class MissingPeer(_message.Message):
    __slots__ = ("peer", "absence", "num_rounds", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ABSENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    absence: Absence
    num_rounds: int
    reason: str
    def __init__(self, peer: _Optional[_Union[Peer, str]] = ..., absence: _Optional[_Union[Absence, str]] = ..., num_rounds: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SpeculativeDecodingMetrics(_message.Message):
    __slots__ = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens")
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    def __init__(self, mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_spec_steps: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_spec_tokens: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("method", "rows", "retrieval", "num_rounds", "num_tokens", "time_ms")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    method: _types_pb2.Method
    rows: _types_pb2.Rows
    retrieval: bool
    num_rounds: int
    num_tokens: int
    time_ms: float
    def __init__(self, method: _Optional[_Union[_types_pb2.Method, str]] = ..., rows: _Optional[_Union[_types_pb2.Rows, str]] = ..., retrieval: _Optional[bool] = ..., num_rounds: _Optional[int] = ..., num_tokens: _Optional[int] = ..., time_ms: _Optional[float] = ...) -> None: ...

class RoundTimes(_message.Message):
    __slots__ = ("round_ms", "forward_ms", "wait_ms", "overhead_ms", "draft_latency_ms", "draft_forward_ms", "retrieval_ms", "draft_retrieval_ms")
    ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RETRIEVAL_MS_FIELD_NUMBER: _ClassVar[int]
    round_ms: float
    forward_ms: float
    wait_ms: float
    overhead_ms: float
    draft_latency_ms: float
    draft_forward_ms: float
    retrieval_ms: float
    draft_retrieval_ms: float
    def __init__(self, round_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ..., overhead_ms: _Optional[float] = ..., draft_latency_ms: _Optional[float] = ..., draft_forward_ms: _Optional[float] = ..., retrieval_ms: _Optional[float] = ..., draft_retrieval_ms: _Optional[float] = ...) -> None: ...

class CollaborateRequest(_message.Message):
    __slots__ = ("open", "draft", "forward_us", "retrieval_us")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_US_FIELD_NUMBER: _ClassVar[int]
    open: CollaborateOpen
    draft: _types_pb2.Draft
    forward_us: int
    retrieval_us: int
    def __init__(self, open: _Optional[_Union[CollaborateOpen, _Mapping]] = ..., draft: _Optional[_Union[_types_pb2.Draft, _Mapping]] = ..., forward_us: _Optional[int] = ..., retrieval_us: _Optional[int] = ...) -> None: ...

class CollaborateOpen(_message.Message):
    __slots__ = ("handshake", "request", "wants_prompt_token_ids")
    HANDSHAKE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handshake: _types_pb2.Handshake
    request: GenerateRequest
    wants_prompt_token_ids: bool
    def __init__(self, handshake: _Optional[_Union[_types_pb2.Handshake, _Mapping]] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., wants_prompt_token_ids: _Optional[bool] = ...) -> None: ...

class CollaborateResponse(_message.Message):
    __slots__ = ("started", "chunk", "finished", "steering", "waiting", "prompt_logprobs", "reading")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEERING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    steering: _types_pb2.Steering
    waiting: Waiting
    prompt_logprobs: PromptLogprobs
    reading: Reading
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., steering: _Optional[_Union[_types_pb2.Steering, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "wants_token_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    wants_token_bytes: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., wants_token_bytes: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("address", "connected", "last_error", "num_shed_tokens", "num_own_sessions", "num_sessions", "max_num_sessions", "busy_percent")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_SHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OWN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    address: str
    connected: bool
    last_error: str
    num_shed_tokens: int
    num_own_sessions: int
    num_sessions: int
    max_num_sessions: int
    busy_percent: int
    def __init__(self, address: _Optional[str] = ..., connected: _Optional[bool] = ..., last_error: _Optional[str] = ..., num_shed_tokens: _Optional[int] = ..., num_own_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ..., max_num_sessions: _Optional[int] = ..., busy_percent: _Optional[int] = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("model", "methods", "default_method", "max_num_speculative_tokens", "max_num_sessions", "num_sessions", "speculator", "datastore", "version", "forward_times", "max_num_rows", "exact_off_reason", "kv_pool", "num_queued", "speculators", "chat_template", "stored_as")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SPECULATOR_FIELD_NUMBER: _ClassVar[int]
    DATASTORE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIMES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXACT_OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    SPECULATORS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    STORED_AS_FIELD_NUMBER: _ClassVar[int]
    model: _types_pb2.ModelInfo
    methods: _containers.RepeatedScalarFieldContainer[_types_pb2.Method]
    default_method: _types_pb2.Method
    max_num_speculative_tokens: int
    max_num_sessions: int
    num_sessions: int
    speculator: PeerInfo
    datastore: PeerInfo
    version: str
    forward_times: _containers.RepeatedCompositeFieldContainer[ForwardTime]
    max_num_rows: int
    exact_off_reason: str
    kv_pool: KvPoolInfo
    num_queued: int
    speculators: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    chat_template: str
    stored_as: str
    def __init__(self, model: _Optional[_Union[_types_pb2.ModelInfo, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[_types_pb2.Method, str]]] = ..., default_method: _Optional[_Union[_types_pb2.Method, str]] = ..., max_num_speculative_tokens: _Optional[int] = ..., max_num_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ..., speculator: _Optional[_Union[PeerInfo, _Mapping]] = ..., datastore: _Optional[_Union[PeerInfo, _Mapping]] = ..., version: _Optional[str] = ..., forward_times: _Optional[_Iterable[_Union[ForwardTime, _Mapping]]] = ..., max_num_rows: _Optional[int] = ..., exact_off_reason: _Optional[str] = ..., kv_pool: _Optional[_Union[KvPoolInfo, _Mapping]] = ..., num_queued: _Optional[int] = ..., speculators: _Optional[_Iterable[_Union[PeerInfo, _Mapping]]] = ..., chat_template: _Optional[str] = ..., stored_as: _Optional[str] = ...) -> None: ...

class KvPoolInfo(_message.Message):
    __slots__ = ("num_tokens", "num_held_tokens", "num_cached_tokens", "block_size")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_held_tokens: int
    num_cached_tokens: int
    block_size: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_held_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class ForwardTime(_message.Message):
    __slots__ = ("num_rows", "forward_ms")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    forward_ms: float
    def __init__(self, num_rows: _Optional[int] = ..., forward_ms: _Optional[float] = ...) -> None: ...
