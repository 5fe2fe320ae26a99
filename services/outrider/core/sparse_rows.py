"""A distribution over few tokens that is the same number for number on both sides of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SparseRow:
    """What a drafted token was drawn from: token i has probability weights[i] / total; all others have none."""

    token_ids: Sequence[int]
    """Each once."""
    weights: Sequence[int]
    """In parallel; at least 1 each."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.weights))

    def probability(self, token_id: int) -> float:
        """q of a token."""
        for known, weight in zip(self.token_ids, self.weights, strict=True):
            if known == token_id:
                return weight / self.total
        return 0.0
