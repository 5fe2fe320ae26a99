"""How likely it is that a draft is right, by how its choices rank and how long it has been right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

NO_CHOICE = -1
"""The rank of a token that is none of the draft's choices."""


@dataclass(frozen=True, slots=True)
class Odds:
    """How likely the target's token is the draft's choice number 0, 1, 2, ...

    `by_run[i]` holds where the i tokens before were first choices, the one before those was not; the last entry holds
    for all longer runs. Where a draft is right, it mostly goes on to be: in a mirror that is one chain, the run is the
    depth.
    """

    by_run: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for row in self.by_run:
            if not row or min(row) < 0 or sum(row) > 1 + 1e-9:
                raise ValueError(f"odds must be at least one probability, with a sum of at most 1, got {row}")
        if not self.by_run:
            raise ValueError("there must be odds after a run of 0")

    @classmethod
    def measured(cls, texts: Iterable[Sequence[int]], num_ranks: int, max_run: int = 16) -> Self:
        """The odds in texts that were watched: for each token the rank it had; NO_CHOICE, or a rank beyond, = none.

        Runs that were seen fewer than `num_ranks` times count together with all longer ones, as do those of `max_run`.
        """
        counts = np.zeros((max_run + 1, num_ranks + 1))
        for ranks in texts:
            run = 0
            for rank in ranks:
                counts[run, rank if 0 <= rank < num_ranks else num_ranks] += 1
                run = min(max_run, run + 1) if rank == 0 else 0
        rows: list[Any] = []
        for run in range(max_run + 1):
            longer = counts[run:].sum(axis=0)
            is_last = counts[run].sum() < num_ranks
            if rows and longer.sum() < num_ranks:
                break
            rows.append(longer if is_last else counts[run])
            if is_last:
                break
        return cls(tuple(tuple((row / max(1.0, row.sum()))[:num_ranks].tolist()) for row in rows))

    def after(self, run: int) -> tuple[float, ...]:
        """The odds after so many first choices in a row."""
        return self.by_run[min(run, len(self.by_run) - 1)]

    def chain_value(self, max_len: int) -> float:
        """Tokens that are kept of a chain of first choices, right after one that was none."""
        value, probability = 0.0, 1.0
        for run in range(max_len):
            probability *= self.after(run)[0]
            value += probability
        return value
