"""Shares a step's budget of prompt rows fairly among sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

MIN_PREFILL_ROWS = 64
"""Least rows of a prompt in a step while more are missing: fewer cost nearly as much. If this many tokens or fewer are
missing, they go into one step together, next to the rows that decode."""

Reader = TypeVar("Reader")


class PrefillTurns(Generic[Reader]):
    """Shares the rows of steps among the sessions whose prompts are read. No session starves: those that do not fit
    into one step come first in the next."""

    def __init__(self, budget: int) -> None:
        """
        Args:
            budget: Most rows of prompts in a step.
        """
        self._budget = budget
        self._clock = 0
        self._read_at: dict[Reader, int] = {}
        """Time at which each session has last read, or came."""

    def shares(self, missing: Mapping[Reader, int]) -> dict[Reader, int]:
        """Shares a step's rows: equally, and in turns if they would be too few for each.

        Args:
            missing: Tokens that each session still has to read, by age; at least 1.

        Returns:
            Rows of each session that has any.
        """
        self._clock += 1
        self._read_at = {reader: self._read_at.get(reader, self._clock) for reader in missing}
        # The session that has read least recently comes first; of those that came together, the oldest.
        turn = sorted(missing, key=self._read_at.__getitem__)[: max(1, self._budget // MIN_PREFILL_ROWS)]
        self._clock += 1
        shares, left = {}, self._budget
        # The shortest first: the others share what they leave.
        for number, reader in enumerate(sorted(turn, key=missing.__getitem__)):
            shares[reader] = min(missing[reader], max(1, left // (len(turn) - number)))
            left -= shares[reader]
            self._read_at[reader] = self._clock
        return shares
