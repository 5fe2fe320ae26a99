"""Parameters of the draws, resolved: every field has a value in its range. They decide the text.

A value outside its range raises `InvalidParameter` when the parameters are made. Here are also the enums of the
parameters of speculation (`outrider.core.speculation`): rows, rules, sources, scopes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


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
"""Most bad words, by their tokens: each word that is given as text has two spellings."""
MAX_BAD_WORD_LEN = 64
"""Most tokens of a bad word."""


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
    """Divides the positive logits of tokens in the prompt or the output, and multiplies the negative ones (Keskar et
    al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and the numbers that are added to their logits."""
    min_tokens: int = 0
    """Output tokens before which none of `stop_token_ids` is drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation, the model's own included. Empty if min_tokens is 0: then the draw does not depend
    on them."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Words, by their tokens: the last token is not drawn after the others."""

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
        """True if filters exclude tokens from the draw, however much noise these have."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on the tokens in the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_adjustments(self) -> bool:
        """True if logits are changed before temperature and filters (`outrider.core.adjustments`)."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.bad_words_token_ids)


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

    # A member is equal only to itself. Enum computes its hash in Python, from the name, and every round looks up many
    # keys that contain a source.
    __hash__ = object.__hash__


class RetrievalScope(Enum):
    """The sessions that may retrieve each other's tokens. The values are those of the wire."""

    SESSION = 1
    """Only the session itself."""
    TENANT = 2
    """All sessions of the same tenant that ask for it."""
    GLOBAL = 3
    """All sessions of all tenants that ask for it."""


TIERS = (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED, Source.RING)
"""Tiers of the datastore."""
OWN_SOURCES = (Source.RECYCLED, Source.POOL)
"""Sources that a verifier keeps for each session, without a datastore."""
SOURCES = (*TIERS, *OWN_SOURCES)
"""Sources of retrieval that a request may name."""
