"""The time of a forward is the device's, even if the host learns of the forward's end before it comes."""

from __future__ import annotations

import pytest
import torch

from outrider.core.costs import AttentionTimes
from outrider.models import fusion
from outrider.models.backend import CPU
from outrider.models.runner import Segment
from outrider.models.timing import (
    EventStopwatch,
    HostStopwatch,
    measure_attention,
    measure_buckets,
    measure_products,
    stopwatch_for,
)
from tests.support.cuda_twins import EAGER_TWIN
from tests.support.tiny_models import build


class Device:
    """Executes its work in order, long after the host has queued it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued_s = 0.0

    def ask(self, work_s: float) -> None:
        self.queued_s += work_s

    def wait(self) -> None:
        self.now_s, self.queued_s = self.now_s + self.queued_s, 0.0


class Event:
    """Like `torch.cuda.Event`: it is recorded when the device reaches it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._at_s = 0.0

    def record(self, device: Device) -> None:
        self._at_s = device.now_s + device.queued_s

    def synchronize(self) -> None:
        self._device.wait()

    def elapsed_time(self, end: Event) -> float:
        if self._device.now_s < end._at_s:
            raise RuntimeError("the device has not come to it")
        return (end._at_s - self._at_s) * 1e3


def test_a_host_that_waits_measures_the_work_and_not_the_asking() -> None:
    device = Device()
    stopwatch = HostStopwatch(device.wait, lambda: device.now_s)
    device.ask(5.0)  # of something else
    timing = stopwatch.start()
    device.ask(0.02)
    timing.stop()
    assert round(timing.elapsed_ms(), 6) == 20.0


def test_events_measure_forwards_one_behind_the_other_without_a_wait() -> None:
    device = Device()
    stopwatch = EventStopwatch(lambda: Event(device), lambda: device)
    device.ask(5.0)
    timings = []
    for work_s in (0.02, 0.03):
        timings.append(stopwatch.start())
        device.ask(work_s)
        timings[-1].stop()
    assert device.now_s == 0.0, "the host has gone on at once"
    assert [round(timing.elapsed_ms(), 6) for timing in timings] == [20.0, 30.0]


def test_events_are_told_of_the_stream_of_the_models_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {torch.device("cuda:0"): Device(), torch.device("cuda:1"): Device()}
    second = devices[torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: Event(second))
    monkeypatch.setattr(torch.cuda, "current_stream", devices.get)
    stopwatch = stopwatch_for(torch.device("cuda:1"))
    timing = stopwatch.start()
    devices[torch.device("cuda:0")].ask(5.0)
    second.ask(0.02)
    timing.stop()
    assert round(timing.elapsed_ms(), 6) == 20.0


def test_a_cpu_needs_no_more_than_the_hosts_clock() -> None:
    stopwatch = stopwatch_for(torch.device("cpu"))
    assert isinstance(stopwatch, HostStopwatch)
    timing = stopwatch.start()
    timing.stop()
    assert timing.elapsed_ms() >= 0


def test_forwards_that_are_filled_up_are_measured_by_what_they_are_filled_up_to() -> None:
    runner = EAGER_TWIN.make_runner(build("llama"), is_exact=False, num_blocks=16)
    context = runner.max_context_len - 100
    # After that context, 100 rows fill the bucket of 128, and the bucket of 256 is out of reach.
    times_ms = measure_buckets(runner, 1000, context, num_repeats=1)
    assert list(times_ms) == [16, 32, 64, 128]
    assert min(times_ms.values()) > 0
    assert list(measure_buckets(runner, 17, context, num_repeats=1)) == [16, 32]
    assert CPU.make_runner(build("llama")).buckets == ()


def test_large_products_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CPU.make_runner(build("llama"))
    assert measure_products(runner, [1, 2]) == {}  # all products are small
    monkeypatch.setattr(fusion, "MIN_LARGE_ENTRIES", 0)
    assert len(runner.large_products()) == 4 * runner.cache_shape.num_layers
    times_ms = measure_products(runner, [1, 2], num_repeats=1)
    assert times_ms.keys() == {1, 2}
    assert min(times_ms.values()) > 0


def test_what_contexts_add_is_measured_where_there_is_room_for_long_ones() -> None:
    runner, small = CPU.make_runner(build("llama"), num_blocks=16), CPU.make_runner(build("llama"), num_blocks=9)
    ids = list(range(40))
    expected = runner.forward([Segment(runner.new_cache(), ids, 1)])
    times = measure_attention(runner, 200, num_repeats=1)
    assert times.slot_ms >= 0 <= times.row_slot_ms
    # The slots that it wrote belong to no session.
    assert torch.equal(runner.forward([Segment(runner.new_cache(), ids, 1)]), expected)
    assert measure_attention(small, 200) == AttentionTimes()
