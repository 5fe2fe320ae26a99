"""Counts of the gateway for Prometheus: its requests, and speculation under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from outrider.core.statistics import Histogram
from outrider.telemetry.generation_metrics import BOUNDS_S
from outrider.telemetry.metrics import HistogramMetric, Metric, Metrics, build_info, counter, counters, gauge
from outrider_client.client import Generation
from outrider_gateway.leniency import LeftAside


class GatewayMetrics:
    """Counts since the start of the process. Lives on the event loop; another thread may read."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, ...], int] = {}
        self._first_bytes = Histogram(BOUNDS_S)
        self._tokens = {"prompt": 0, "output": 0}
        self._kept_by_position: dict[int, int] = {0: 0}
        self._num_drafts = self._num_drafted = self._num_accepted = 0
        self.left_aside = LeftAside()
        """Counts the ignored parameters of requests."""
        self.num_disconnects = 0
        """Requests whose client left before its answer was complete."""
        self.num_streams = 0
        """Current streams."""
        self.num_waiting = 0
        """Requests that no verifier has taken yet."""
        self.num_running = 0
        """Requests that generate now, including streams."""

    def answered(self, route: str, status: int, first_byte_s: float) -> None:
        """Counts an answer that has begun. `route`: the pattern of its route, so that there are as many series as
        routes."""
        key = (route, str(status))
        self._requests[key] = self._requests.get(key, 0) + 1
        self._first_bytes.add(first_byte_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a request that waits for a verifier while the body runs."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts a generating request while the body runs."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream while the body runs."""
        self.num_streams += 1
        try:
            with self.running():
                yield
        finally:
            self.num_streams -= 1

    def count(self, generations: Iterable[Generation]) -> None:
        """Counts the tokens of ended generations, and the statistics of speculation of those that were completed."""
        for generation in generations:
            self._tokens["prompt"] += generation.num_prompt_tokens
            self._tokens["output"] += generation.num_output_tokens
            for result in generation.results:
                if result is None:
                    continue
                told = result.summary.speculative_decoding
                self._num_drafts += told.num_spec_steps
                self._num_drafted += told.num_draft_tokens
                self._num_accepted += told.num_accepted_draft_tokens
                for kept, rounds in enumerate(told.acceptance_histogram):
                    for position in range(kept):
                        self._kept_by_position[position] = self._kept_by_position.get(position, 0) + rounds

    def read(self) -> Metrics:
        """Yields the metrics."""
        yield build_info("gateway")
        yield Metric(
            "outrider_gateway_requests_total", "Answers that have begun.", "counter", ("route", "status"),
            dict(self._requests),
        )  # fmt: skip
        yield HistogramMetric(
            "outrider_gateway_first_byte_seconds", "Time from a request to the first byte of its answer.",
            self._first_bytes,
        )  # fmt: skip
        yield gauge("outrider_gateway_streams", "Streams now.", self.num_streams)
        yield counters("outrider_gateway_tokens_total", "Tokens of requests that are over.", "kind", dict(self._tokens))
        yield counter(
            "outrider_gateway_client_disconnects_total", "Requests whose client went before their end.",
            self.num_disconnects,
        )  # fmt: skip
        yield counters(
            "outrider_gateway_left_aside_total", "Parameters that were left aside (--lenient).", "parameter",
            {name: float(count) for name, count in self.left_aside.counts.copy().items()},
        )  # fmt: skip
        # In the form that clients of vLLM read.
        yield gauge("vllm:num_requests_running", "Requests that generate now.", self.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait for their turn now.", self.num_waiting)
        yield counter("vllm:spec_decode_num_drafts_total", "Rounds that verified drafted tokens.", self._num_drafts)
        yield counter("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens verified.", self._num_drafted)
        yield counter("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens kept.", self._num_accepted)
        yield counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", "Drafted tokens kept, by their place in the draft.",
            "position", {str(position): float(count) for position, count in list(self._kept_by_position.items())},
        )  # fmt: skip
