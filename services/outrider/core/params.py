"""Parameters of a generation, resolved: every field has a value, and every value is in its range.

`SamplingParams` decide the text, `SpeculationParams` how fast it comes, and `Steering` changes the latter while a
generation runs. A value of a wrong range raises `InvalidParameter` where it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property


class InvalidParameter(ValueError):
    """A parameter is outside its range. The message names the field, the rule and the value."""

    def __init__(self, field: str, rule: str, value: object) -> None:
        super().__init__(f"{field} must be {rule}, got {value}")
        self.field = field
        self.rule = rule


def check(condition: bool, field: str, rule: str, value: object) -> None:
    """Raises InvalidParameter unless the condition holds."""
    if not condition:
        raise InvalidParameter(field, rule, value)


MAX_LOGIT_BIAS = 1024
"""Most tokens that have a bias."""
MAX_BAD_WORDS = 512
"""Most words that must not be said, by their tokens: two spellings of each word that is given as text."""
MAX_BAD_WORD_LEN = 64
"""Most tokens of one of them."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the target's draws. A draw is a pure function of (logits, these, the tokens before, output
    index)."""

    seed: int = 0
    """Keys the Gumbel noise. 0 <= seed < 2**64."""
    temperature: float = 1.0
    """Divides the logits. 0 means greedy."""
    top_k: int = 0
    """Keeps the k most probable tokens. 0 means all."""
    top_p: float = 1.0
    """Keeps the smallest set of most probable tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keeps tokens at least min_p times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or output have, multiplies the negative ones (Keskar et al.
    2019)."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the output has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""
    min_tokens: int = 0
    """Output tokens before which none of `stop_token_ids` is drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation, those of the model included. Empty where min_tokens is 0: the draw does not
    depend on them then."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Words, by their tokens: the last one is not drawn behind the others."""

    def __post_init__(self) -> None:
        check(0 <= self.seed < 2**64, "sampling.seed", "in [0, 2**64)", self.seed)
        check(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "sampling.temperature",
            "finite and >= 0",
            self.temperature,
        )
        check(self.top_k >= 0, "sampling.top_k", ">= 0 (0 = all)", self.top_k)
        check(0 < self.top_p <= 1, "sampling.top_p", "in (0, 1]", self.top_p)
        check(0 <= self.min_p <= 1, "sampling.min_p", "in [0, 1]", self.min_p)
        penalty = self.repetition_penalty
        check(math.isfinite(penalty) and penalty > 0, "sampling.repetition_penalty", "finite and > 0", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(-2 <= value <= 2, f"sampling.{name}", "in [-2, 2]", value)
        check(self.min_tokens >= 0, "sampling.min_tokens", ">= 0", self.min_tokens)
        self._check_tokens()

    def _check_tokens(self) -> None:
        field, count = "sampling.logit_bias", len(self.logit_bias)
        check(count <= MAX_LOGIT_BIAS, field, f"of at most {MAX_LOGIT_BIAS} tokens", count)
        for token_id, bias in self.logit_bias:
            check(-100 <= bias <= 100, f"{field}[{token_id}]", "in [-100, 100]", bias)
        field, count = "sampling.bad_words_token_ids", len(self.bad_words_token_ids)
        check(count <= MAX_BAD_WORDS, field, f"at most {MAX_BAD_WORDS} words", count)
        for index, word in enumerate(self.bad_words_token_ids):
            length = len(word)
            check(1 <= length <= MAX_BAD_WORD_LEN, f"{field}[{index}]", f"1 to {MAX_BAD_WORD_LEN} tokens", length)

    @property
    def is_greedy(self) -> bool:
        """True if the draw is the most probable token, without noise."""
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """True if a token that is not allowed may not be drawn, however much noise it has."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on which tokens the text has."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_adjustments(self) -> bool:
        """True if logits are changed before temperature and filters (`outrider.core.adjustments`)."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.bad_words_token_ids)


class Method(Enum):
    """A way to grow the draft tree and to wait for it."""

    OFF = "off"
    SPECULATIVE = "speculative"
    PEARL = "pearl"
    RETRIEVAL = "retrieval"
    CARD = "card"
    SAGUARO = "saguaro"
    DOUBLE = "double"
    SPACELIKE = "spacelike"
    BEST_FIRST = "best-first"
    OPT_TREE = "opt-tree"
    SEQUOIA = "sequoia"
    AUTO = "auto"

    __hash__ = object.__hash__  # see `Source`

    # What follows from a method is asked in every round of every session.

    @cached_property
    def has_draft_model(self) -> bool:
        """True if a speculator, where there is one, grows the tree."""
        return self not in (Method.OFF, Method.RETRIEVAL, Method.SPACELIKE)

    @cached_property
    def needs_draft_model(self) -> bool:
        """True if the method does nothing without a speculator."""
        return self.has_draft_model and self is not Method.AUTO

    @cached_property
    def needs_datastore(self) -> bool:
        """True if the method does nothing without a datastore."""
        return self is Method.SPACELIKE

    @cached_property
    def drafts_ahead(self) -> bool:
        """True if the tree grows while the target verifies."""
        return self.has_draft_model and self not in (Method.SPECULATIVE, Method.OPT_TREE, Method.SEQUOIA)

    @cached_property
    def always_retrieves(self) -> bool:
        """True if continuations are looked up even if the request does not ask for it."""
        return self in (Method.RETRIEVAL, Method.SPACELIKE, Method.DOUBLE, Method.AUTO)

    @cached_property
    def samples(self) -> bool:
        """True if its drafted tokens can be samples of the draft model, as the ratio rule needs them."""
        return self in (Method.SPECULATIVE, Method.PEARL, Method.SAGUARO, Method.DOUBLE)


class Rows(Enum):
    """The use of the rows of a target forward. The values are those of the wire."""

    CHAIN = 1
    """One path of the draft tree."""
    TREE = 2
    """The best connected sub-tree: there is one draw for each node, and the path follows the draws."""


class AcceptanceRule(Enum):
    """The rule by which drafted tokens are kept. The values are those of the wire."""

    MATCH = 1
    """Tokens that equal the target's own draw are kept. The text is a function of prompt, parameters and seed."""
    RATIO = 2
    """A token x is kept with probability min(1, p(x)/q(x)) (Leviathan et al. 2023, algorithm 1). The text has the
    target's distribution."""


class Source(Enum):
    """The origin of a token. The values are those of the wire."""

    TARGET = 1
    DRAFT = 2
    PRIOR = 3
    DYNAMIC = 4
    REJECTED = 5
    # 6 is reserved in the proto.
    SHARED = 7
    RING = 8
    RECYCLED = 9
    POOL = 10
    RANDOM = 11
    GRAMMAR = 12
    PREDICTION = 13

    # A member is equal to itself alone. Enum's own hash is computed in Python, from the name, and every round looks up
    # many keys with a source in them.
    __hash__ = object.__hash__


class RetrievalScope(Enum):
    """The sessions that may retrieve each other's tokens. The values are those of the wire."""

    SESSION = 1
    """Only the session itself."""
    TENANT = 2
    """All sessions of the same tenant that ask for it."""
    GLOBAL = 3
    """All sessions of all tenants that ask for it."""


# Bounds of what a request may ask for: they keep a forward, a message and a tree of one session small.
MAX_BEAM_WIDTH = 256
MAX_BUDGET = 256
MAX_ROWS = 64
MAX_CHILDREN = 8
MAX_ASKED_MATCH_LEN = 10
MAX_PHRASE_LEN = 16


def _check_range(field_name: str, value: float, low: float, high: float) -> None:
    # NaN lies in no range, so it is refused here without a test of its own.
    check(low <= value <= high, f"speculation.{field_name}", f"in [{low:g}, {high:g}]", value)


@dataclass(frozen=True, slots=True)
class CardParams:
    """CARD: a beam of candidates, queried and corrected."""

    beam_width: int = 16
    """Candidates kept for each layer (K, the size of a layer of the primary cache)."""
    num_children: int = 8
    """Children considered for each candidate (k). The paper has as many as K."""
    correction: bool = True
    """Lets commits redirect the beam, and a miss restart it at once. False is the paper's ablation, query without
    correction (section 3.3)."""
    refill: bool = True
    """Gives the places that a commit has freed to the best candidates that had been cut. The paper does not."""

    def __post_init__(self) -> None:
        _check_range("card.beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _check_range("card.num_children", self.num_children, 1, MAX_BEAM_WIDTH)


class FanOut(Enum):
    """The numbers of next tokens that are predicted after each position of a chain. The values are those of the
    wire."""

    GEOMETRIC = 1
    """Fewer after later positions (SAGUARO, Theorem 12), from the measured acceptance rate."""
    UNIFORM = 2
    """Equally many after each position."""
    GIVEN = 3
    """The numbers are those of `SaguaroParams.fan_outs`."""


class Fallback(Enum):
    """The reaction to a miss. The values are those of the wire."""

    AUTO = 1
    """The cheapest reaction, by the number of sessions and the measured times."""
    DRAFT = 2
    """The target waits for a chain that is drafted now."""
    RETRIEVAL = 3
    """A retrieved chain."""
    PLAIN = 4
    """One plain token."""
    RANDOM = 5
    """Random tokens, to compare: what is verified in vain costs no wait (the paper's fast backup)."""


@dataclass(frozen=True, slots=True)
class SaguaroParams:
    """SAGUARO: the outcomes of a verification are predicted, and drafted for before they are known."""

    fan_out: FanOut = FanOut.GEOMETRIC
    budget: int = 16
    """Outcomes that are drafted for at a time (B, the sum of the F_k)."""
    exponent: float = 0.0
    """Rate at which misses become fewer with the fan-out: their probability falls like F ** -exponent (r). 0 means as
    measured in this session."""
    fan_outs: tuple[int, ...] = ()
    """F_k for k = 0, 1, ...; the last one holds for all later positions. Only for GIVEN."""
    fallback: Fallback = Fallback.AUTO
    bias: float = 1.0
    """Factor of the probabilities of the most probable draft tokens before sampling (C of SAGUARO sampling, section
    4.2): below 1, the token after a refusal is more often among the outcomes. Only under the ratio rule."""
    num_biased: int = 0
    """Tokens that are scaled by the bias (F). 0 means at each position the fan-out there."""

    def __post_init__(self) -> None:
        _check_range("saguaro.budget", self.budget, 1, MAX_BUDGET)
        _check_range("saguaro.exponent", self.exponent, 0, 10)
        is_given = self.fan_out is FanOut.GIVEN
        check(
            bool(self.fan_outs) == is_given,
            "speculation.saguaro.fan_outs",
            "set for FAN_OUT_GIVEN and only for it",
            list(self.fan_outs),
        )
        for index, count in enumerate(self.fan_outs):
            _check_range(f"saguaro.fan_outs[{index}]", count, 0, MAX_BUDGET)
        check(0 <= self.bias <= 1, "speculation.saguaro.bias", "in [0, 1]", self.bias)
        _check_range("saguaro.num_biased", self.num_biased, 0, 64)


TIERS = (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED, Source.RING)
"""Tiers of the datastore."""
OWN_SOURCES = (Source.RECYCLED, Source.POOL)
"""Sources that a verifier has of its own for each session, without a datastore."""
SOURCES = (*TIERS, *OWN_SOURCES)
"""Sources of retrieval that a request may name."""


@dataclass(frozen=True, slots=True)
class DoubleParams:
    """DOUBLE: retrieval on both sides. Its ablations are switches."""

    max_match_len: int = 4
    """Longest n-gram that is looked up (n of Algorithm 3)."""
    max_phrase_len: int = 10
    """Most retrieved tokens that one forward verifies, behind what was drafted (d)."""
    draft_retrieval: bool = True
    """Lets the draft model verify retrieved phrases."""
    target_retrieval: bool = True
    """Puts retrieved tokens behind the drafted chain in every forward of the target, as many as pay."""
    tiers: tuple[Source, ...] = TIERS
    """Tiers that are looked up."""
    serial: bool = False
    """Lets draft and target take turns, as they must where both share one device (section D.8)."""

    def __post_init__(self) -> None:
        _check_range("double.max_match_len", self.max_match_len, 1, MAX_ASKED_MATCH_LEN)
        _check_range("double.max_phrase_len", self.max_phrase_len, 1, MAX_PHRASE_LEN)
        for index, tier in enumerate(self.tiers):
            names = ", ".join(known.name for known in TIERS)
            check(tier in TIERS, f"speculation.double.tiers[{index}]", f"one of {names}", tier.name)


@dataclass(frozen=True, slots=True)
class SpacelikeParams:
    """Spacelike decoding: continuations come from all earlier outputs of the system."""

    max_match_len: int = 10
    """Longest context that is looked up; shorter ones follow."""
    whole_runs: bool = False
    """Takes what followed a context most often as a whole, cut to num_speculative_tokens (16 at most), as the paper
    does. False takes what follows most often token by token."""

    def __post_init__(self) -> None:
        _check_range("spacelike.max_match_len", self.max_match_len, 1, MAX_ASKED_MATCH_LEN)


@dataclass(frozen=True, slots=True)
class BestFirstParams:
    """best-first: the most probable unexpanded nodes anywhere in the tree."""

    num_expanded: int = 0
    """Nodes expanded by one draft forward (M). 0 means few while the target waits, more while it works."""
    num_children: int = 8
    """Candidates considered for each expanded node; those of improbable paths do not become nodes."""
    serial: bool = False
    """Lets draft and target take turns, as pays where both share one device: the tree is the most probable path, and
    beside it what came next in each of its rows."""

    def __post_init__(self) -> None:
        _check_range("best_first.num_expanded", self.num_expanded, 0, MAX_ROWS)
        _check_range("best_first.num_children", self.num_children, 1, MAX_CHILDREN)
        rule = "unset or 0 where draft and target take turns (best_first.serial)"
        check(not (self.serial and self.num_expanded), "speculation.best_first.num_expanded", rule, self.num_expanded)


@dataclass(frozen=True, slots=True)
class OptTreeParams:
    """OPT-Tree: the n nodes with the most probable paths."""

    num_nodes: int = 32
    """Nodes of a tree (n)."""
    min_gain: float = 0.1
    """Growth ends with a draft forward that raises the expected number of kept tokens by less than this (delta). The
    paper advises at least the time of a draft forward in forwards of the target."""

    def __post_init__(self) -> None:
        _check_range("opt_tree.num_nodes", self.num_nodes, 1, MAX_ROWS)
        _check_range("opt_tree.min_gain", self.min_gain, 0, 1)


@dataclass(frozen=True, slots=True)
class SequoiaParams:
    """Sequoia: a tree whose shape follows from the acceptance rates by rank."""

    num_nodes: int = 32
    """Nodes of a tree (n)."""

    def __post_init__(self) -> None:
        _check_range("sequoia.num_nodes", self.num_nodes, 1, MAX_ROWS)


MethodParams = (
    CardParams | SaguaroParams | DoubleParams | SpacelikeParams | BestFirstParams | OptTreeParams | SequoiaParams
)
PARAMS_OF: dict[Method, type[MethodParams]] = {
    Method.CARD: CardParams,
    Method.SAGUARO: SaguaroParams,
    Method.DOUBLE: DoubleParams,
    Method.SPACELIKE: SpacelikeParams,
    Method.BEST_FIRST: BestFirstParams,
    Method.OPT_TREE: OptTreeParams,
    Method.SEQUOIA: SequoiaParams,
}


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Parameters of drafting and of verification. They decide how fast a text comes, and under the match rule never
    which."""

    method: Method = Method.OFF
    num_speculative_tokens: int = 8
    """Most tokens of a path verified in one round (gamma)."""
    lookahead: int = 8
    """Most tokens beyond the committed ones that the speculator may draft."""
    min_path_probability: float = 0.0
    """A chain ends where the draft model's probability of the whole path falls below this. 0 means never."""
    rows: Rows = Rows.CHAIN
    """Use of the rows of a target forward."""
    max_rows: int = 0
    """Most drafted rows of one target forward, for Rows.TREE. 0 means as many as pay, by the measured forward times."""
    acceptance_rule: AcceptanceRule = AcceptanceRule.MATCH
    shared_noise: bool = True
    """Lets the speculator rank tokens with the target's own noise (Daliri, Musco, Suresh 2024). False means by its own
    probabilities alone, for comparison."""
    calibration: bool = True
    """Scores drafts by how often the target has agreed with such drafts, and verifies as many as pay. False means as
    the papers have it, for comparison: the draft model's own probabilities, phrases of fixed length, chains and tails
    verified whole."""
    retrieval: bool = False
    """Puts retrieved continuations behind the chain, and in its place when it is empty."""
    retrieval_scope: RetrievalScope = RetrievalScope.SESSION
    """Sessions that share their tokens for retrieval."""
    contribute: bool = False
    """Lets the other sessions of the scope retrieve this session's tokens."""
    sources: tuple[Source, ...] = TIERS
    """Sources that are looked up, the preferred first. `Method.DOUBLE` has its own tiers, `Method.SPACELIKE` the
    ring."""
    card: CardParams = field(default_factory=CardParams)
    saguaro: SaguaroParams = field(default_factory=SaguaroParams)
    double: DoubleParams = field(default_factory=DoubleParams)
    spacelike: SpacelikeParams = field(default_factory=SpacelikeParams)
    best_first: BestFirstParams = field(default_factory=BestFirstParams)
    opt_tree: OptTreeParams = field(default_factory=OptTreeParams)
    sequoia: SequoiaParams = field(default_factory=SequoiaParams)

    def __post_init__(self) -> None:
        gamma, method = self.num_speculative_tokens, self.method
        check(gamma >= 1, "speculation.num_speculative_tokens", ">= 1", gamma)
        rule = f">= num_speculative_tokens ({gamma})"
        check(self.lookahead >= gamma, "speculation.lookahead", rule, self.lookahead)
        probability = self.min_path_probability
        check(0 <= probability < 1, "speculation.min_path_probability", "in [0, 1)", probability)
        _check_range("max_rows", self.max_rows, 0, MAX_ROWS)
        is_ratio = self.acceptance_rule is AcceptanceRule.RATIO
        is_tree = self.rows is Rows.TREE
        # Rules name fields and values as the wire does: callers read these messages.
        check(
            method.has_draft_model or method is Method.RETRIEVAL or not is_tree,
            "speculation.rows",
            "ROWS_CHAIN for a method without a draft model other than METHOD_RETRIEVAL",
            "ROWS_TREE",
        )
        sampled = ", ".join(known.value for known in Method if known.samples)
        rule = f"ACCEPTANCE_RULE_MATCH for a method other than {sampled}"
        check(method.samples or not is_ratio, "speculation.acceptance_rule", rule, "ACCEPTANCE_RULE_RATIO")
        rule = "ROWS_CHAIN under the ratio rule: it judges one sample after the other"
        check(not (is_ratio and is_tree), "speculation.rows", rule, "ROWS_TREE")
        rule = "1 under the match rule: the bias is of sampled tokens"
        check(is_ratio or self.saguaro.bias == 1, "speculation.saguaro.bias", rule, self.saguaro.bias)
        rule = "false with method off"
        check(not (self.retrieval and method is Method.OFF), "speculation.retrieval", rule, self.retrieval)
        rule = "true with method off or auto, which chooses by calibrated scores"
        check(self.calibration or method not in (Method.OFF, Method.AUTO), "speculation.calibration", rule, False)
        check(
            not (self.contribute and self.retrieval_scope is RetrievalScope.SESSION),
            "speculation.retrieval_params.contribute",
            "unset or false with the scope of one session",
            self.contribute,
        )
        self._check_sources()

    def _check_sources(self) -> None:
        field = "speculation.retrieval_params.sources"
        names = ", ".join(f"SOURCE_{known.name}" for known in SOURCES)
        for index, source in enumerate(self.sources):
            is_new = source in SOURCES and source not in self.sources[:index]
            check(is_new, f"{field}[{index}]", f"one of {names}, each at most once", f"SOURCE_{source.name}")
        check(bool(self.sources), field, "at least one source", "none")
        without = self.method not in (Method.DOUBLE, Method.SPACELIKE) or self.sources == TIERS
        rule = f"unset for method {self.method.value}, whose own parameters decide where it looks"
        check(without, field, rule, ", ".join(f"SOURCE_{each.name}" for each in self.sources))

    @property
    def retrieves(self) -> bool:
        """True if continuations are looked up."""
        return self.retrieval or self.method.always_retrieves

    @property
    def min_path_logprob(self) -> float:
        """The logarithm of `min_path_probability`; minus infinity for 0."""
        return math.log(self.min_path_probability) if self.min_path_probability > 0 else -math.inf

    def takes_turns(self, method: Method) -> bool:
        """Returns True if a method, of which these may be the parameters of `Method.AUTO`, drafts first and then
        verifies: the target waits for its drafts, and nothing grows meanwhile."""
        if method is Method.DOUBLE:
            return self.double.serial
        if method is Method.BEST_FIRST:
            return self.best_first.serial
        return method.has_draft_model and not method.drafts_ahead

    @property
    def is_ratio(self) -> bool:
        """True if the ratio rule was asked for. At temperature 0 both rules agree, and drafts need no q."""
        return self.acceptance_rule is AcceptanceRule.RATIO


@dataclass(frozen=True, slots=True)
class Steering:
    """A change of parameters for a drafter while a generation runs. What has grown so far stays."""

    speculation: SpeculationParams | None = None
    """Parameters to grow by from here on; Method.OFF pauses. None means no change."""
    forward_us: int = 0
    """Time of one forward of the target, in microseconds. 0 means no change."""
    round_trip_us: int = 0
    """Time from a commit to the first draft that answers it, without the drafting itself, in microseconds. 0 means no
    change."""
    max_num_nodes: int = 0
    """Most nodes that a round of the target can verify. 0 means no change."""

    @property
    def is_pause(self) -> bool:
        """True if nothing shall grow until further notice."""
        return self.speculation is not None and self.speculation.method is Method.OFF

    def then(self, later: Steering) -> Steering:
        """Returns the one change that has the effect of this one followed by a later one."""
        # `or` is safe: parameters are never falsy, and a number of 0 means no change.
        return Steering(
            later.speculation or self.speculation,
            later.forward_us or self.forward_us,
            later.round_trip_us or self.round_trip_us,
            later.max_num_nodes or self.max_num_nodes,
        )
