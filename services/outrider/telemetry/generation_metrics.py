"""Counts calls that stream a generation: how they end, and how long their callers wait.

Lives on the event loop; another thread may read. Counting a round costs a few additions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.core.statistics import Histogram
from outrider.telemetry.metrics import HistogramMetric, Metric, Metrics, gauge
from outrider.v1 import verifier_pb2

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FINISH_REASONS = {
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_STOP: "stop",
}
CODES = {code.value[0]: code.name for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationCalls:
    """Counts the calls since the start of the process."""

    def __init__(self) -> None:
        # Zeros from the start: Prometheus sees no increase in a series that begins at 1.
        self.ended: dict[tuple[str, ...], int] = {("OK", reason): 0 for reason in FINISH_REASONS.values()}
        """Calls by status code and, for completed ones, finish reason."""
        self.num_running = 0
        """Admitted calls that have received tokens."""
        self.num_waiting = 0
        """Admitted calls whose prompt is not processed yet."""
        self.durations = Histogram(BOUNDS_S)
        """Durations of the completed calls; all times here are in seconds."""
        self.first_tokens = Histogram(BOUNDS_S)
        """Times from a call to its first token."""
        self.tokens = Histogram(BOUNDS_S)
        """Times between two tokens: the tokens of a chunk share the time since the previous chunk."""
        self.chunks = Histogram(BOUNDS_S)
        """Times between two chunks."""

    @contextmanager
    def call(self, context: Context) -> Iterator[GenerationCall]:
        """Counts a call while the body runs. The body must set the call's status before it ends, or be cancelled."""
        call = GenerationCall(self)
        code = "OK"
        try:
            yield call
            code = CODES.get(_number(context.code()), "UNKNOWN")
        except asyncio.CancelledError:
            # grpc.aio cancels the handler in both cases, and does not say in which.
            time_left_s = context.time_remaining()
            code = "CANCELLED" if time_left_s is None or time_left_s > 0 else "DEADLINE_EXCEEDED"
            raise
        finally:
            call.end(code)


class GenerationCall:
    """Counts one call and measures its times."""

    __slots__ = ("_began", "_calls", "_finish_reason", "_finished_at", "_is_admitted", "_last")

    def __init__(self, calls: GenerationCalls) -> None:
        self._calls = calls
        self._began = time.perf_counter()
        self._last: float | None = None
        self._is_admitted = False
        self._finish_reason = ""
        self._finished_at: float | None = None

    def admit(self) -> None:
        """Counts the call as admitted: from now on it is worked on. Idempotent."""
        if not self._is_admitted:
            self._is_admitted = True
            self._calls.num_waiting += 1

    def chunk(self, num_tokens: int) -> None:
        """Counts tokens that are sent; possibly 0 in the last chunk."""
        now, last, calls = time.perf_counter(), self._last, self._calls
        self._last = now
        if last is None:
            calls.num_waiting -= 1
            calls.num_running += 1
            # The rest of a text comes in a chunk without tokens, which may be the first chunk.
            if num_tokens:
                calls.first_tokens.add(now - self._began)
        elif num_tokens:
            calls.chunks.add(now - last)
            calls.tokens.add((now - last) / num_tokens, num_tokens)

    def finish(self, reason: verifier_pb2.FinishReason) -> None:
        """Records the finish reason when everything is sent: of several texts, that of the last one."""
        self._finish_reason = FINISH_REASONS.get(reason, "")
        self._finished_at = time.perf_counter()

    def end(self, code: str) -> None:
        """Counts the call as ended with this status."""
        calls, key = self._calls, (code, self._finish_reason if code == "OK" else "")
        if self._finished_at is not None:
            calls.durations.add(self._finished_at - self._began)
        calls.ended[key] = calls.ended.get(key, 0) + 1
        if self._last is not None:
            calls.num_running -= 1
        elif self._is_admitted:
            calls.num_waiting -= 1


def _number(code: Any) -> int:
    """Returns the number of a status, which is a number or a `grpc.StatusCode`; None and 0 mean OK."""
    return int(code.value[0] if isinstance(code, grpc.StatusCode) else code or 0)


def read_calls(calls: GenerationCalls, prefix: str) -> Metrics:
    """Yields all metrics, under names that begin with the prefix. Safe to call in any thread."""
    yield Metric(
        prefix + "requests_total",
        "Generations by how their calls have ended: status code and, of those that came to their end, finish reason.",
        "counter",
        ("code", "finish_reason"),
        {**calls.ended},  # a copy: the event loop may add a key while it is read
    )
    yield gauge(prefix + "requests_running", "Generations that have begun to speak, now.", calls.num_running)
    yield gauge(prefix + "requests_waiting", "Generations whose prompt is not processed yet, now.", calls.num_waiting)
    yield HistogramMetric(
        prefix + "request_duration_seconds", "From a call to its end, of those that came to it.", calls.durations
    )
    yield HistogramMetric(prefix + "time_to_first_token_seconds", "From a call to its first token.", calls.first_tokens)
    yield HistogramMetric(
        prefix + "inter_token_latency_seconds",
        "From one token to the next: those of a chunk share the time since the chunk before.",
        calls.tokens,
    )
    yield HistogramMetric(prefix + "inter_chunk_latency_seconds", "From one chunk to the next.", calls.chunks)
