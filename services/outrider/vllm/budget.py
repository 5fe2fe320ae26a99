"""How many drafted tokens a batch should verify, and how long it may wait for drafts.

The rows of a batch share one forward: what one of them waits for, all wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.costs import ForwardTimes
from outrider.core.statistics import RunningMean

FORGETTING = 0.98
"""Weight of a step in what is known of steps, for each step since."""
MAX_OUTLIER = 3.0
"""A step that took more than so many times the expected time, or less than its inverse, counts as that."""
MANY_ROWS = 256
FIRST_MS = 20.0
"""Assumed time of a step until one was measured."""
OVERHEAD_MS = 0.5
"""Assumed time of a step that does not depend on the forward at all."""
LEAST_TRUST = 0.02
RECOVERY = 1.02
"""Factor by which trust in drafts comes back with each step that verifies none."""


class StepTimes:
    """Learns the time of a step by its rows, as a line through the latest steps."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.forward_times = ForwardTimes({1: FIRST_MS})
        """The time of a step with so many rows."""

    def observe(self, num_rows: int, time_ms: float) -> None:
        """Takes in the time of a step."""
        if num_rows < 1 or time_ms <= 0:
            return
        if self._weight:
            expected_ms = self.forward_times.of(num_rows)
            time_ms = min(MAX_OUTLIER * expected_ms, max(expected_ms / MAX_OUTLIER, time_ms))
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        added = (1.0, num_rows, time_ms, num_rows * num_rows, num_rows * time_ms)
        self._weight, self._x, self._y, self._xx, self._xy = (
            FORGETTING * known + new for known, new in zip(sums, added, strict=True)
        )
        self.forward_times = self._fitted()

    def _fitted(self) -> ForwardTimes:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if variance > 1e-6 * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
        # More rows never cost less, and a step without rows costs at least nothing.
        slope = min(max(0.0, slope), mean_y / mean_x)
        first_ms = max(1e-3, mean_y - slope * (mean_x - 1))
        return ForwardTimes({1: first_ms, MANY_ROWS: first_ms + slope * (MANY_ROWS - 1)})


class Budget:
    """Decides for a batch. Owned by the thread of vLLM's engine."""

    def __init__(self, max_patience_ms: float) -> None:
        """
        Args:
            max_patience_ms: Longest wait of a step.
        """
        self._max_patience_ms = max_patience_ms
        self.steps = StepTimes()
        self._trust = 1.0
        """Tokens that were accepted of drafts, as a share of those that their drafter expected."""
        self._accepted, self._expected = RunningMean(0.05), RunningMean(0.05)

    def patience_ms(self, num_rows: int, wishes: Sequence[float]) -> float:
        """Returns how long the batch may wait, in milliseconds.

        Args:
            num_rows: Its rows.
            wishes: For each row without a chain, how long one is worth waiting for to that row alone; 0 if none comes.
        """
        if 2 * len(wishes) <= num_rows:
            return 0.0
        return min(self._max_patience_ms, sum(wishes) / num_rows)

    def num_tokens(self, chains: Sequence[Sequence[float]]) -> list[int]:
        """Returns how many tokens of each row's chain to verify, so that the step brings the most tokens per time.

        Args:
            chains: For each row, the probabilities that the target says the first one, two, ... of its tokens; they
                never rise.
        """
        times, tokens, best = self.steps.forward_times, float(len(chains)), 0
        best_rate = tokens / (times.of(len(chains)) + OVERHEAD_MS) if chains else 0.0
        # The most probable first: of each chain that is a beginning. Among equals, the lower depth.
        order = sorted(
            (-probability, depth, row) for row, chain in enumerate(chains) for depth, probability in enumerate(chain)
        )
        for count, (negative, _, _) in enumerate(order, start=1):
            tokens -= negative * self._trust
            rate = tokens / (times.of(len(chains) + count) + OVERHEAD_MS)
            if rate >= best_rate:
                best, best_rate = count, rate
        taken = [0] * len(chains)
        for _, _, row in order[:best]:
            taken[row] += 1
        return taken

    def learn(self, expected: float, accepted: int) -> None:
        """Takes in a step's drafts.

        Args:
            expected: Tokens that should have been accepted, by their probabilities. 0: it verified none.
            accepted: Tokens that were.
        """
        if expected <= 0:
            self._trust = min(1.0, self._trust * RECOVERY)
            return
        self._expected.add(expected)
        self._accepted.add(accepted)
        # Never above 1: a drafter that doubts itself is rare, and one that lies is not believed more for luck.
        ratio = self._accepted.get(0.0) / max(1e-6, self._expected.get(1.0))
        self._trust = min(1.0, max(LEAST_TRUST, ratio))
