"""Reports a speculator's load to its callers: to each connection once, and again after a change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from outrider.v1 import speculator_pb2

WINDOW_S = 1.0
"""Least time over which the engine's use is measured."""
STEP_PERCENT = 10
"""Steps in which its use is reported."""
NEWS_PERCENT = 20
"""Least change of its use that is reported by itself."""


class EngineUse:
    """Measures the share of the time that an engine is busy. May be used in any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the time in seconds."""
        self._clock = clock
        # Beginning of the window, busy seconds until then, and the share of the last window. Replaced as one: of two
        # threads that end a window at once, either is right.
        self._window = (clock(), 0.0, 0)

    def percent(self, busy_s: float) -> int:
        """Returns the share in percent, in steps, over the last second at least.

        Args:
            busy_s: Time that the engine has been busy since its start, in seconds.
        """
        began, busy_before_s, percent = self._window
        elapsed_s = self._clock() - began
        if elapsed_s >= WINDOW_S:
            # An engine that has followed another one begins at 0.
            share = min(1.0, max(0.0, (busy_s - busy_before_s) / elapsed_s))
            percent = STEP_PERCENT * round(100 * share / STEP_PERCENT)
            self._window = began + elapsed_s, busy_s, percent
        return percent


class LoadReports:
    """Measures the load, and knows which connections have been told of it. Lives on the event loop.

    Connections are told, not streams: a verifier has one connection for all its sessions, and needs to hear of a change
    once.
    """

    def __init__(self, max_num_sessions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_num_sessions, self._use = max_num_sessions, EngineUse(clock)
        self._num_streams: Counter[str] = Counter()
        self._told: dict[str, speculator_pb2.SpeculatorLoad] = {}

    def current(self, num_sessions: int, busy_s: float) -> speculator_pb2.SpeculatorLoad:
        """Returns the load now.

        Args:
            num_sessions: Sessions now.
            busy_s: Time that the engine has been busy since its start, in seconds.
        """
        return speculator_pb2.SpeculatorLoad(
            num_sessions=num_sessions,
            max_num_sessions=self._max_num_sessions,
            busy_percent=self._use.percent(busy_s),
        )

    def open(self, connection: str, load: speculator_pb2.SpeculatorLoad) -> None:
        """Records that a stream begins on a connection, and that its first message reports this load."""
        self._num_streams[connection] += 1
        self._told[connection] = load

    def close(self, connection: str) -> None:
        """Records that a stream of a connection has ended."""
        self._num_streams[connection] -= 1
        # Connections come and go, each with a name of its own.
        if not self._num_streams[connection]:
            del self._num_streams[connection], self._told[connection]

    def news(self, connection: str, load: speculator_pb2.SpeculatorLoad) -> speculator_pb2.SpeculatorLoad | None:
        """Returns the load if it is news to a connection with a stream, and counts it as reported; otherwise None."""
        told = self._told[connection]
        is_near = abs(load.busy_percent - told.busy_percent) < NEWS_PERCENT
        if load.num_sessions == told.num_sessions and is_near:
            return None
        self._told[connection] = load
        return load
