"""Parameters of a generation, resolved: every field has a value, and every value is in its range.

`SamplingParams` decide the text. `SpeculationParams` decide how fast it comes; the text never depends on them.
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is drawn. A draw is a pure function of (logits, these, output index)."""

    seed: int = 0
    """Keys the Gumbel noise. 0 <= seed < 2**64."""
    temperature: float = 1.0
    """Divides the logits; 0 = greedy."""
    top_k: int = 0
    """Keeps the k most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Keeps the smallest set of most probable tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keeps tokens at least min_p times as probable as the most probable one."""

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

    @property
    def is_greedy(self) -> bool:
        """Whether the draw is the most probable token, without noise."""
        return self.temperature == 0


class Method(Enum):
    """How the draft tree grows, and whether the target waits for it."""

    OFF = "off"
    SPECULATIVE = "speculative"
    PEARL = "pearl"
    RETRIEVAL = "retrieval"

    @property
    def has_draft_model(self) -> bool:
        """Whether a speculator grows the tree."""
        return self in (Method.SPECULATIVE, Method.PEARL)


class Source(Enum):
    """Where a token came from. The values are those of the wire."""

    TARGET = 1
    DRAFT = 2
    PRIOR = 3
    DYNAMIC = 4
    REJECTED = 5
    SHARED = 7
    RING = 8


class RetrievalScope(Enum):
    """Who may retrieve a session's tokens, and whose tokens it may retrieve. The values are those of the wire."""

    SESSION = 1
    """Nobody but the session itself."""
    TENANT = 2
    """All sessions of the same tenant that ask for it."""
    GLOBAL = 3
    """All sessions of all tenants that ask for it."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How drafts are made. Changes the speed, never the text."""

    method: Method = Method.OFF
    num_speculative_tokens: int = 8
    """Most chain tokens verified in one round (gamma)."""
    lookahead: int = 8
    """How many tokens beyond the committed ones the speculator may draft."""
    min_path_probability: float = 0.0
    """A chain ends where the draft model's probability of the whole path falls below this; 0 = never."""
    retrieval: bool = False
    """Whether retrieved continuations stand behind the chain, and in place of one when there is none."""
    retrieval_scope: RetrievalScope = RetrievalScope.SESSION
    """With whom retrieval shares."""
    contribute: bool = False
    """Whether the others of the scope may retrieve this session's tokens."""

    def __post_init__(self) -> None:
        check(
            self.num_speculative_tokens >= 1,
            "speculation.num_speculative_tokens",
            ">= 1",
            self.num_speculative_tokens,
        )
        check(
            self.lookahead >= self.num_speculative_tokens,
            "speculation.lookahead",
            f">= num_speculative_tokens ({self.num_speculative_tokens})",
            self.lookahead,
        )
        check(
            0 <= self.min_path_probability < 1,
            "speculation.min_path_probability",
            "in [0, 1)",
            self.min_path_probability,
        )
        check(
            not (self.retrieval and self.method is Method.OFF),
            "speculation.retrieval",
            "false with method off",
            self.retrieval,
        )
        check(
            not (self.contribute and self.retrieval_scope is RetrievalScope.SESSION),
            "speculation.retrieval_params.contribute",
            "unset or false with the scope of one session",
            self.contribute,
        )

    @property
    def retrieves(self) -> bool:
        """Whether continuations are looked up."""
        return self.retrieval or self.method is Method.RETRIEVAL
