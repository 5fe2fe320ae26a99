"""What the machine can do: the cost of a forward by its number of rows, and the ceiling that this sets.

A round that verifies k drafted tokens costs one forward of k + 1 rows and gives at most k + 1 tokens. Against decoding,
where each token costs a forward of one row, no draft can win more than (k + 1) * t(1) / t(k + 1). This is the forward
alone: sampling and everything else comes on top of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TARGET_ROWS = (1, 2, 4, 8, 16, 32)
DRAFT_ROWS = (1, 16)


@dataclass(frozen=True, slots=True)
class Machine:
    """Median times of forwards, in milliseconds, by number of rows."""

    target_forward_ms: Mapping[int, float] = field(default_factory=dict)
    draft_forward_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def speed_ratio(self) -> float | None:
        """C: forwards of the draft model, one row each, that fit into one of the target."""
        target, draft = self.target_forward_ms.get(1), self.draft_forward_ms.get(1)
        return target / draft if target and draft else None

    @property
    def ceilings(self) -> dict[int, float]:
        """Speed-up with k perfect drafts a round, by k. Times between two measured numbers of rows are interpolated."""
        times = sorted(self.target_forward_ms.items())
        if len(times) < 2 or times[0][0] != 1:
            return {}
        rows, milliseconds = [row for row, _ in times], [time for _, time in times]
        base = milliseconds[0]
        return {k: (k + 1) * base / float(np.interp(k + 1, rows, milliseconds)) for k in range(1, rows[-1])}

    @property
    def best_ceiling(self) -> tuple[int, float] | None:
        """The best k, and the speed-up there."""
        return max(self.ceilings.items(), key=lambda item: item[1], default=None)

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "target_forward_ms": {str(rows): time for rows, time in sorted(self.target_forward_ms.items())},
            "draft_forward_ms": {str(rows): time for rows, time in sorted(self.draft_forward_ms.items())},
            "speed_ratio_C": self.speed_ratio,
            "perfect_draft_ceiling": {str(k): ceiling for k, ceiling in self.ceilings.items()},
        }
