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
    METHOD_CARD: _ClassVar[Method]
    METHOD_SAGUARO: _ClassVar[Method]
    METHOD_DOUBLE: _ClassVar[Method]
    METHOD_SPACELIKE: _ClassVar[Method]
    METHOD_BEST_FIRST: _ClassVar[Method]
    METHOD_AUTO: _ClassVar[Method]
    METHOD_OPT_TREE: _ClassVar[Method]
    METHOD_SEQUOIA: _ClassVar[Method]

class Rows(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROWS_UNSPECIFIED: _ClassVar[Rows]
    ROWS_CHAIN: _ClassVar[Rows]
    ROWS_TREE: _ClassVar[Rows]

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_MATCH: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_RATIO: _ClassVar[AcceptanceRule]

class FanOut(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAN_OUT_UNSPECIFIED: _ClassVar[FanOut]
    FAN_OUT_GEOMETRIC: _ClassVar[FanOut]
    FAN_OUT_UNIFORM: _ClassVar[FanOut]
    FAN_OUT_GIVEN: _ClassVar[FanOut]

class Fallback(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_UNSPECIFIED: _ClassVar[Fallback]
    FALLBACK_AUTO: _ClassVar[Fallback]
    FALLBACK_DRAFT: _ClassVar[Fallback]
    FALLBACK_RETRIEVAL: _ClassVar[Fallback]
    FALLBACK_PLAIN: _ClassVar[Fallback]
    FALLBACK_RANDOM: _ClassVar[Fallback]

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
    SOURCE_RECYCLED: _ClassVar[Source]
    SOURCE_POOL: _ClassVar[Source]
    SOURCE_RANDOM: _ClassVar[Source]
    SOURCE_GRAMMAR: _ClassVar[Source]
    SOURCE_PREDICTION: _ClassVar[Source]
METHOD_UNSPECIFIED: Method
METHOD_OFF: Method
METHOD_SPECULATIVE: Method
METHOD_PEARL: Method
METHOD_RETRIEVAL: Method
METHOD_CARD: Method
METHOD_SAGUARO: Method
METHOD_DOUBLE: Method
METHOD_SPACELIKE: Method
METHOD_BEST_FIRST: Method
METHOD_AUTO: Method
METHOD_OPT_TREE: Method
METHOD_SEQUOIA: Method
ROWS_UNSPECIFIED: Rows
ROWS_CHAIN: Rows
ROWS_TREE: Rows
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_MATCH: AcceptanceRule
ACCEPTANCE_RULE_RATIO: AcceptanceRule
FAN_OUT_UNSPECIFIED: FanOut
FAN_OUT_GEOMETRIC: FanOut
FAN_OUT_UNIFORM: FanOut
FAN_OUT_GIVEN: FanOut
FALLBACK_UNSPECIFIED: Fallback
FALLBACK_AUTO: Fallback
FALLBACK_DRAFT: Fallback
FALLBACK_RETRIEVAL: Fallback
FALLBACK_PLAIN: Fallback
FALLBACK_RANDOM: Fallback
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
SOURCE_RECYCLED: Source
SOURCE_POOL: Source
SOURCE_RANDOM: Source
SOURCE_GRAMMAR: Source
SOURCE_PREDICTION: Source

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "bad_words_token_ids", "stop", "include_stop_str_in_output")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "json_object", "regex", "grammar", "choice", "begins_after", "special_tokens_as_text")
    JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_AFTER_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_AS_TEXT_FIELD_NUMBER: _ClassVar[int]
    json: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choices
    begins_after: str
    special_tokens_as_text: bool
    def __init__(self, json: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., begins_after: _Optional[str] = ..., special_tokens_as_text: _Optional[bool] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("method", "num_speculative_tokens", "lookahead", "min_path_probability", "retrieval", "retrieval_params", "rows", "max_rows", "acceptance_rule", "shared_noise", "allow_fallback", "card", "saguaro", "double", "spacelike", "best_first", "opt_tree", "sequoia", "calibration")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    SHARED_NOISE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    SAGUARO_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_FIELD_NUMBER: _ClassVar[int]
    SPACELIKE_FIELD_NUMBER: _ClassVar[int]
    BEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    OPT_TREE_FIELD_NUMBER: _ClassVar[int]
    SEQUOIA_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    method: Method
    num_speculative_tokens: int
    lookahead: int
    min_path_probability: float
    retrieval: bool
    retrieval_params: RetrievalParams
    rows: Rows
    max_rows: int
    acceptance_rule: AcceptanceRule
    shared_noise: bool
    allow_fallback: bool
    card: CardParams
    saguaro: SaguaroParams
    double: DoubleParams
    spacelike: SpacelikeParams
    best_first: BestFirstParams
    opt_tree: OptTreeParams
    sequoia: SequoiaParams
    calibration: bool
    def __init__(self, method: _Optional[_Union[Method, str]] = ..., num_speculative_tokens: _Optional[int] = ..., lookahead: _Optional[int] = ..., min_path_probability: _Optional[float] = ..., retrieval: _Optional[bool] = ..., retrieval_params: _Optional[_Union[RetrievalParams, _Mapping]] = ..., rows: _Optional[_Union[Rows, str]] = ..., max_rows: _Optional[int] = ..., acceptance_rule: _Optional[_Union[AcceptanceRule, str]] = ..., shared_noise: _Optional[bool] = ..., allow_fallback: _Optional[bool] = ..., card: _Optional[_Union[CardParams, _Mapping]] = ..., saguaro: _Optional[_Union[SaguaroParams, _Mapping]] = ..., double: _Optional[_Union[DoubleParams, _Mapping]] = ..., spacelike: _Optional[_Union[SpacelikeParams, _Mapping]] = ..., best_first: _Optional[_Union[BestFirstParams, _Mapping]] = ..., opt_tree: _Optional[_Union[OptTreeParams, _Mapping]] = ..., sequoia: _Optional[_Union[SequoiaParams, _Mapping]] = ..., calibration: _Optional[bool] = ...) -> None: ...

class CardParams(_message.Message):
    __slots__ = ("beam_width", "num_children", "correction", "refill")
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    REFILL_FIELD_NUMBER: _ClassVar[int]
    beam_width: int
    num_children: int
    correction: bool
    refill: bool
    def __init__(self, beam_width: _Optional[int] = ..., num_children: _Optional[int] = ..., correction: _Optional[bool] = ..., refill: _Optional[bool] = ...) -> None: ...

class SaguaroParams(_message.Message):
    __slots__ = ("fan_out", "budget", "exponent", "fan_outs", "fallback", "bias", "num_biased")
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    FAN_OUTS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_BIASED_FIELD_NUMBER: _ClassVar[int]
    fan_out: FanOut
    budget: int
    exponent: float
    fan_outs: _containers.RepeatedScalarFieldContainer[int]
    fallback: Fallback
    bias: float
    num_biased: int
    def __init__(self, fan_out: _Optional[_Union[FanOut, str]] = ..., budget: _Optional[int] = ..., exponent: _Optional[float] = ..., fan_outs: _Optional[_Iterable[int]] = ..., fallback: _Optional[_Union[Fallback, str]] = ..., bias: _Optional[float] = ..., num_biased: _Optional[int] = ...) -> None: ...

class DoubleParams(_message.Message):
    __slots__ = ("max_match_len", "max_phrase_len", "draft_retrieval", "target_retrieval", "tiers", "serial")
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_PHRASE_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    TARGET_RETRIEVAL_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    max_match_len: int
    max_phrase_len: int
    draft_retrieval: bool
    target_retrieval: bool
    tiers: _containers.RepeatedScalarFieldContainer[Source]
    serial: bool
    def __init__(self, max_match_len: _Optional[int] = ..., max_phrase_len: _Optional[int] = ..., draft_retrieval: _Optional[bool] = ..., target_retrieval: _Optional[bool] = ..., tiers: _Optional[_Iterable[_Union[Source, str]]] = ..., serial: _Optional[bool] = ...) -> None: ...

class SpacelikeParams(_message.Message):
    __slots__ = ("max_match_len", "whole_runs")
    MAX_MATCH_LEN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_RUNS_FIELD_NUMBER: _ClassVar[int]
    max_match_len: int
    whole_runs: bool
    def __init__(self, max_match_len: _Optional[int] = ..., whole_runs: _Optional[bool] = ...) -> None: ...

class BestFirstParams(_message.Message):
    __slots__ = ("num_expanded", "num_children", "serial")
    NUM_EXPANDED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    num_expanded: int
    num_children: int
    serial: bool
    def __init__(self, num_expanded: _Optional[int] = ..., num_children: _Optional[int] = ..., serial: _Optional[bool] = ...) -> None: ...

class OptTreeParams(_message.Message):
    __slots__ = ("num_nodes", "min_gain")
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    min_gain: float
    def __init__(self, num_nodes: _Optional[int] = ..., min_gain: _Optional[float] = ...) -> None: ...

class SequoiaParams(_message.Message):
    __slots__ = ("num_nodes",)
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    num_nodes: int
    def __init__(self, num_nodes: _Optional[int] = ...) -> None: ...

class RetrievalParams(_message.Message):
    __slots__ = ("scope", "contribute", "sources", "remote")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    scope: RetrievalScope
    contribute: bool
    sources: _containers.RepeatedScalarFieldContainer[Source]
    remote: bool
    def __init__(self, scope: _Optional[_Union[RetrievalScope, str]] = ..., contribute: _Optional[bool] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., remote: _Optional[bool] = ...) -> None: ...

class SourceCount(_message.Message):
    __slots__ = ("source", "num_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: Source
    num_tokens: int
    def __init__(self, source: _Optional[_Union[Source, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("base_len", "token_ids", "acknowledged_node_id")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    acknowledged_node_id: int
    def __init__(self, base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., acknowledged_node_id: _Optional[int] = ...) -> None: ...

class Steering(_message.Message):
    __slots__ = ("speculation", "forward_us", "round_trip_us", "max_num_nodes")
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    speculation: SpeculationParams
    forward_us: int
    round_trip_us: int
    max_num_nodes: int
    def __init__(self, speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., forward_us: _Optional[int] = ..., round_trip_us: _Optional[int] = ..., max_num_nodes: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("base_len", "first_node_id", "parent_offsets", "token_ids", "costs", "source", "q_rows", "num_forwards", "num_phrase_tokens", "num_rows", "num_withheld_nodes")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PHRASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHHELD_NODES_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    first_node_id: int
    parent_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    costs: _containers.RepeatedScalarFieldContainer[int]
    source: Source
    q_rows: _containers.RepeatedCompositeFieldContainer[SparseRow]
    num_forwards: int
    num_phrase_tokens: int
    num_rows: int
    num_withheld_nodes: int
    def __init__(self, base_len: _Optional[int] = ..., first_node_id: _Optional[int] = ..., parent_offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., costs: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[Source, str]] = ..., q_rows: _Optional[_Iterable[_Union[SparseRow, _Mapping]]] = ..., num_forwards: _Optional[int] = ..., num_phrase_tokens: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_withheld_nodes: _Optional[int] = ...) -> None: ...

class SparseRow(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "tokenizer_hash", "vocab_size", "max_context_len", "eos_token_ids", "dtype", "numerics_id", "default_sampling")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    numerics_id: str
    default_sampling: SamplingParams
    def __init__(self, model_id: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., numerics_id: _Optional[str] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

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
