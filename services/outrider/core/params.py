"""Parameters of a generation, resolved: every field has a value, and every value is in its range.

`SamplingParams` decide the text. `outrider.core.speculation.SpeculationParams` decide how fast it comes.
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
    CARD = "card"
    SAGUARO = "saguaro"
    DOUBLE = "double"
    SPACELIKE = "spacelike"
    BEST_FIRST = "best-first"
    AUTO = "auto"

    @property
    def has_draft_model(self) -> bool:
        """Whether a speculator, where there is one, grows the tree."""
        return self not in (Method.OFF, Method.RETRIEVAL, Method.SPACELIKE)

    @property
    def needs_draft_model(self) -> bool:
        """Whether the method is nothing without a speculator."""
        return self.has_draft_model and self is not Method.AUTO

    @property
    def needs_datastore(self) -> bool:
        """Whether the method is nothing without a datastore."""
        return self is Method.SPACELIKE

    @property
    def drafts_ahead(self) -> bool:
        """Whether the tree goes on growing while the target verifies."""
        return self.has_draft_model and self is not Method.SPECULATIVE

    @property
    def always_retrieves(self) -> bool:
        """Whether continuations are looked up without being asked for."""
        return self in (Method.RETRIEVAL, Method.SPACELIKE, Method.DOUBLE, Method.AUTO)

    @property
    def samples(self) -> bool:
        """Whether its drafted tokens can be samples of the draft model, as the ratio rule needs them."""
        return self in (Method.SPECULATIVE, Method.PEARL, Method.SAGUARO, Method.DOUBLE)


class Rows(Enum):
    """What the rows of a target forward are spent on. The values are those of the wire."""

    CHAIN = 1
    """One path of the draft tree."""
    TREE = 2
    """The best connected sub-tree: one draw for each node, and down to the child that equals the draw."""


class AcceptanceRule(Enum):
    """Which drafted tokens are kept. The values are those of the wire."""

    MATCH = 1
    """Those that equal the target's own draw. The text is a function of prompt, parameters and seed."""
    RATIO = 2
    """x with probability min(1, p(x)/q(x)) (Leviathan et al. 2023). The text has the target's distribution."""


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
