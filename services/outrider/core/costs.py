"""Costs of a round: the number of rows of a target forward that pays, and the time that a draft is worth.

A forward reads its weights once, whatever its rows, so rows are nearly free up to a point: 8 on a CPU in bfloat16, 32
to 64 on a GPU. That point is measured when the server starts. A row brings as many tokens as its path is probable. A
draft that is waited for must bring more tokens than plain rounds in that time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.speculation import Waiting
from outrider.core.tree import Node

LEARNING_RATE = 0.05
"""Weight of one forward in the running time of its size."""
MAX_DEVIATION = 2.0
"""Greatest ratio, up or down, of a forward's time to the usual one that is learnt. Beyond it, the host was
disturbed."""


class Contexts(NamedTuple):
    """Describes the text before the rows of a forward."""

    num_slots: int = 0
    """Slots that are attended, of all sessions together."""
    num_sessions: int = 1


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Predicts the time that attention adds to a forward with long contexts. Each session's keys and values are read
    once, which takes a time per slot. Each of its rows attends to them, which takes a time per row and slot."""

    slot_ms: float = 0.0
    row_slot_ms: float = 0.0
    context_len: int = 0
    """Slots before the rows in the forwards that were measured by size; shorter contexts count as this long."""

    def of(self, num_rows: int, contexts: Contexts) -> float:
        """Returns the added time in milliseconds. Sessions are taken to have equally many of the rows."""
        num_beyond = max(0, contexts.num_slots - contexts.num_sessions * self.context_len)
        return num_beyond * (self.slot_ms + self.row_slot_ms * num_rows / max(1, contexts.num_sessions))


class ForwardTimes:
    """Predicts the time of one target forward by its rows, in milliseconds, from measurements at some sizes.

    Between the sizes it interpolates linearly. Beyond the largest one the time grows in proportion to the rows, until
    forwards of that size have been observed: two noisy measurements that lie close together do not determine a line.
    With a single measured size, all others count as equal to it.

    Times need not rise with the rows: matrix products have kernels for some sizes that are faster than those for
    smaller ones. The rows of a sub-tree cost as much as those of a chain: the mask is a small part of the attention
    (measured: within 2 % at 8 to 32 rows after 200 to 800 tokens).

    The sizes were measured with a short context. The time that long ones add is predicted separately, for `contexts`.

    Some forwards are padded to a few sizes, as the graphs of a GPU are. Then any number of rows up to a size costs as
    much as that size, and more rows than the largest size take several forwards.
    """

    def __init__(
        self,
        measured_ms: Mapping[int, float],
        *,
        is_filled_up: bool = False,
        attention: AttentionTimes | None = None,
    ) -> None:
        """
        Args:
            measured_ms: Times by number of rows.
            is_filled_up: True if every forward is padded to the next of these numbers.
            attention: Predicts the time that long contexts add. None means that they add none.

        Raises:
            ValueError: There is no measurement, or one is not positive.
        """
        if not measured_ms or min(measured_ms.values()) <= 0 or min(measured_ms) < 1:
            raise ValueError(f"forward times must be positive, for at least one size, got {dict(measured_ms)}")
        self._sizes = sorted(measured_ms)
        self._times_ms = [measured_ms[size] for size in self._sizes]
        self._step = self._sizes[-1]
        """Rows from one size to the next beyond the largest one that was measured at first."""
        self._is_filled_up = is_filled_up
        self._known: dict[int, float] = {}
        """Times of sizes, without the time that contexts add."""
        self._attention = attention or AttentionTimes()
        self._attention_scale = 1.0
        """Ratio of the time that contexts add to the first measurement of it."""
        self.contexts = Contexts()
        """Contexts of the forwards whose times are asked for."""

    def observe(self, num_rows: int, time_ms: float, contexts: Contexts | None = None) -> None:
        """Learns from a forward: the time of the nearest size, and the time that contexts add, move slowly towards its
        time.

        A machine that was busy when the server started may become idle. A forward beyond the largest size adds a size.

        Args:
            num_rows: Its rows.
            time_ms: Its time.
            contexts: Those before its rows. None means `contexts`.
        """
        attention_ms = self._attention_ms(num_rows, self.contexts if contexts is None else contexts)
        if num_rows > self._sizes[-1] and not self._is_filled_up:
            self._add_size(num_rows, time_ms - attention_ms)
            return
        expected = self._without_contexts(num_rows) + attention_ms
        ratio = min(MAX_DEVIATION, max(1 / MAX_DEVIATION, time_ms / expected))
        # The error is divided between the two parts in proportion to their times.
        share = attention_ms / expected
        self._attention_scale *= 1 + LEARNING_RATE * share * (ratio - 1)
        if self._is_filled_up:
            nearest = min(bisect_left(self._sizes, num_rows), len(self._sizes) - 1)
        else:
            nearest = min(range(len(self._sizes)), key=lambda index: abs(self._sizes[index] - num_rows))
        self._times_ms[nearest] *= 1 + LEARNING_RATE * (1 - share) * (ratio - 1)
        self._known.clear()  # times between the sizes depend on this one

    def _add_size(self, num_rows: int, time_ms: float) -> None:
        if len(self._sizes) == 1:
            return
        # In whole steps, so that sizes are few. Rounded up, as fewer rows do not take longer than more rows.
        size = -(-num_rows // self._step) * self._step
        # The first time of a size may be a hiccup, so it is kept between the known times and the estimate without it.
        bounded_ms = min(self._without_contexts(size), max(max(self._times_ms), time_ms))
        self._sizes.append(size)
        self._times_ms.append(bounded_ms)
        self._known.clear()

    def of(self, num_rows: int, contexts: Contexts | None = None) -> float:
        """Returns the time of a forward with these contexts; None means `contexts`. Beyond the largest size it is at
        least that of every known size."""
        contexts = self.contexts if contexts is None else contexts
        return self._without_contexts(num_rows) + self._attention_ms(num_rows, contexts)

    def _attention_ms(self, num_rows: int, contexts: Contexts) -> float:
        return self._attention_scale * self._attention.of(num_rows, contexts)

    def _without_contexts(self, num_rows: int) -> float:
        # Cached, because `num_worth` asks for one size after the other in every round.
        time_ms = self._known.get(num_rows)
        if time_ms is None:
            time_ms = self._known[num_rows] = self._estimated(num_rows)
        return time_ms

    def _estimated(self, num_rows: int) -> float:
        sizes, times = self._sizes, self._times_ms
        if self._is_filled_up:
            num_full, left = divmod(num_rows, sizes[-1])
            return num_full * times[-1] + (times[bisect_left(sizes, left)] if left else 0.0)
        if num_rows <= sizes[0] or len(sizes) == 1:
            return times[0]
        if num_rows > sizes[-1]:
            return max(max(times), times[-1] * num_rows / sizes[-1])
        # At least 1, because num_rows is more than the smallest size here.
        upper = bisect_left(sizes, num_rows)
        lower = upper - 1
        slope = (times[upper] - times[lower]) / (sizes[upper] - sizes[lower])
        return times[lower] + slope * (num_rows - sizes[lower])


def path_probabilities(nodes: Sequence[Node], root: Node) -> list[float]:
    """Returns for each node the probability that the target says all tokens from the root down to it."""
    # Rounding may leave the difference of two sums a little above 0.
    return [math.exp(min(0.0, node.path_logprob - root.path_logprob)) for node in nodes]


def num_worth(
    probabilities: Sequence[float], times: ForwardTimes, num_sharing: int = 1, overhead_ms: float = 1.0
) -> int:
    """Returns the number of rows, from the first, with the most tokens per time of the round.

    Args:
        probabilities: For each row, in the order in which they would be taken, that its token is accepted.
        times: The target's forward.
        num_sharing: Sessions in one forward. Their rows share its time; all are taken to want equally many.
        overhead_ms: Time of a round besides its forward.
    """
    # A round without drafted rows brings one token, the target's own draw. The search does not stop at the first worse
    # number, because more rows can be cheaper (`ForwardTimes`).
    best, best_rate, tokens = 0, 1.0 / (times.of(num_sharing) + overhead_ms), 1.0
    for count, probability in enumerate(probabilities, start=1):
        tokens += probability
        rate = tokens / (times.of(num_sharing * (1 + count)) + overhead_ms)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


STUCK_AFTER_TIMEOUTS = 3
"""Wasted waits in a row before a drafter counts as stuck and is not waited for until it answers again."""


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """The measured speed of a drafter when a wait is decided."""

    latency_ms: float | None
    """Usual time from a commit to the first draft that answers it. None means not known yet."""
    forward_ms: float
    """Usual time of a target forward."""
    accepted_per_chain: float
    """Usual number of tokens accepted of a chain that is not empty."""
    num_timeouts: int
    """Wasted waits since the drafter last answered."""
    num_sessions: int = 1
    """Sessions that share the forwards."""


HOLD_SHARE = 0.25
"""Share of a forward's time for which a round is held back for waiting sessions that it would leave out: two forwards
one after the other cost more, as each reads all weights."""


def critical_batch(timings: DraftTimings) -> float:
    """Returns the number of sessions from which on none of them should wait for a draft after a miss (b* of SAGUARO's
    fallback by batch size).

    A session that waits for the time L gains the kept tokens of a chain, less those of the plain rounds that it leaves
    out. Meanwhile each of the others stands still for L, or for HOLD_SHARE of a forward, after which they go on without
    it.
    """
    latency_ms = _latency_ms(timings)
    if not timings.forward_ms or not latency_ms:
        return math.inf
    gained = timings.accepted_per_chain - latency_ms / timings.forward_ms
    lost_by_each = min(latency_ms / timings.forward_ms, HOLD_SHARE) * (1 + timings.accepted_per_chain)
    return 1 + gained / lost_by_each


def _latency_ms(timings: DraftTimings) -> float:
    return 0.2 * timings.forward_ms if timings.latency_ms is None else timings.latency_ms


def patience_ms(waiting: Waiting, timings: DraftTimings) -> float:
    """Returns the time to wait for a draft, counted from the commit. 0 means not at all.

    A draft that is waited for saves `accepted_per_chain` plain rounds. Waiting longer than these last costs more than
    it brings. A draft that usually comes after t ms is given up after 2 t + 1 ms: it is then taken for lost, not late.
    """
    if waiting is Waiting.NEVER or timings.num_timeouts >= STUCK_AFTER_TIMEOUTS:
        return 0.0
    if waiting.is_certain:
        return 250.0 if timings.latency_ms is None else max(20.0, 4 * timings.latency_ms)
    if waiting is Waiting.BY_BATCH and timings.num_sessions >= critical_batch(timings):
        return 0.0
    latency_ms = _latency_ms(timings)
    worth_ms = timings.accepted_per_chain * timings.forward_ms
    return 2 * latency_ms + 1 if latency_ms < worth_ms else 0.0
