"""Times of a simulated pair: what forwards and messages take, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in milliseconds."""

    target_ms: Mapping[int, float]
    """Times of a target forward, by its number of rows."""
    draft_ms: float
    draft_row_ms: float
    """Times of a draft forward: without rows, and per row."""
    one_way_ms: float
    """Time of a message between the services."""
    overhead_ms: float
    """Time of a round besides its forward."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object that a worker reads; see `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Self:
        """Reads what `to_json` has made: in JSON numbers of rows are strings, as all keys are."""
        rows = {int(count): ms for count, ms in message["target_ms"].items()}
        return cls(**{**message, "target_ms": rows})


CPU = Costs(
    target_ms={1: 20.0, 4: 20.0, 8: 22.0, 16: 30.0, 32: 47.0},
    draft_ms=0.75,
    draft_row_ms=0.035,
    one_way_ms=0.45,
    overhead_ms=1.0,
)
"""The demo pair on one core each, on a Zen 4."""
GPU = Costs(
    target_ms={1: 20.0, 64: 22.0, 256: 30.0},
    draft_ms=1.0,
    draft_row_ms=0.01,
    one_way_ms=0.05,
    overhead_ms=0.5,
)
"""Two parallel devices on which rows cost hardly anything, as in the papers' measurements."""
