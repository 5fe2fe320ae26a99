"""Metrics as Prometheus reads them."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.statistics import Histogram
from outrider.security.watched_files import WatchedFiles
from outrider.server.export import ServiceMetrics
from outrider.server.run import serve
from outrider.server.settings import ServiceSettings, model_config, parse_settings
from outrider.telemetry.metrics import (
    HistogramMetric,
    Metric,
    Metrics,
    MetricsServer,
    build_info,
    counter,
    counters,
    gauge,
)
from outrider.version import __version__
from tests.support.certificates import replaced
from tests.support.idle_service import Idle, is_serving, serving

COUNTED = {"lookups": 1}


class Settings(ServiceSettings):
    """Metrics of a service."""

    model_config = model_config("outrider.test")


def read() -> Metrics:
    durations = Histogram((0.1, 0.5))
    for value, count in ((0.1, 1), (0.3, 2), (2.0, 3)):
        durations.add(value, count)
    yield counter("outrider_lookups_total", "Lookups.", COUNTED["lookups"])
    yield counters("outrider_hits_total", "Hits.", "tier", {"prior": 3, "ring": 4})
    yield Metric("outrider_bytes_total", "Bytes.", "counter", ("peer", "direction"), {("datastore", "sent"): 7})
    yield gauge("outrider_memory_bytes", "Memory.", 5.5)
    yield build_info("test", model="m")
    yield HistogramMetric("outrider_duration_seconds", "Durations.", durations)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", read)
    yield server
    server.close()


def samples(address: str) -> dict[tuple[str, str], float]:
    """What Prometheus would store: by the name and the values of the labels, which are sorted by their names."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_counters_gauges_and_histograms(server: MetricsServer) -> None:
    found = samples(server.address)
    assert {name: value for name, value in found.items() if name[0].startswith("outrider_")} == {
        ("outrider_lookups_total", ""): 1,
        ("outrider_hits_total", "prior"): 3,
        ("outrider_hits_total", "ring"): 4,
        ("outrider_bytes_total", "sent,datastore"): 7,
        ("outrider_memory_bytes", ""): 5.5,
        ("outrider_build_info", f"test,m,{__version__}"): 1,
        ("outrider_duration_seconds_bucket", "0.1"): 1,
        ("outrider_duration_seconds_bucket", "0.5"): 3,
        ("outrider_duration_seconds_bucket", "+Inf"): 6,
        ("outrider_duration_seconds_count", ""): 6,
        ("outrider_duration_seconds_sum", ""): pytest.approx(6.7),
    }


def test_the_process_is_described_too(server: MetricsServer) -> None:
    found = samples(server.address)
    assert found["process_resident_memory_bytes", ""] > 1e6
    assert any(name == "python_info" for name, _ in found)


def test_each_reading_is_of_that_moment(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COUNTED, "lookups", 41)
    assert samples(server.address)["outrider_lookups_total", ""] == 41


def test_a_port_that_is_taken_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(server.address, read)
    with pytest.raises(SystemExit, match=rf"error: --metrics-listen: cannot bind {server.address}: .*in use"):
        ServiceMetrics(read, server.address, bool)


@pytest.mark.parametrize("value", ["9090", "host:", "host:99999", "host:port"])
def test_a_wrong_address_is_refused_with_the_flag(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--metrics-listen", value])
    assert "--metrics-listen (or OUTRIDER_TEST_METRICS_LISTEN): must be HOST:PORT" in capsys.readouterr().err


def test_no_address_is_no_server() -> None:
    assert parse_settings(Settings, []).metrics_listen == ""
    assert ServiceMetrics(read, "", bool).address == ""


class Loading(Idle):
    """A service that keeps loading until it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.may_load = asyncio.Event()

    async def load(self) -> None:
        await self.may_load.wait()

    def metrics(self) -> Metrics:
        return (gauge("outrider_of_its_own", "A number.", 3.0),)


async def test_a_service_is_read_while_it_loads(capsys: pytest.CaptureFixture[str]) -> None:
    service = Loading()
    settings = ServiceSettings(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0")
    async with serving(service, capsys, settings) as (address, _, metrics):
        found = await asyncio.to_thread(samples, metrics)
        assert (found["outrider_serving", ""], found["outrider_of_its_own", ""]) == (0, 3)
        service.may_load.set()
        async with asyncio.timeout(10):
            while not await is_serving(address):  # noqa: ASYNC110 - it is polled as a probe polls
                await asyncio.sleep(0.005)
        assert (await asyncio.to_thread(samples, metrics))["outrider_serving", ""] == 1


async def test_a_service_whose_port_for_metrics_is_taken_ends_with_one_line(server: MetricsServer) -> None:
    settings = ServiceSettings(listen="127.0.0.1:0", metrics_listen=server.address)
    with pytest.raises(SystemExit, match=r"^error: --metrics-listen: cannot bind"):
        await serve(Idle(), settings)


def test_files_that_have_become_unusable_are_told_by_their_flag(tmp_path: Path) -> None:
    def number(contents: object) -> int:
        assert isinstance(contents, list)
        return int(contents[0])

    good, bad = replaced(tmp_path / "good", b"1"), replaced(tmp_path / "bad", b"1")
    watched = [WatchedFiles("--good", [good], number), WatchedFiles("--bad", [bad], number)]
    metrics = ServiceMetrics(read, "127.0.0.1:0", bool)
    try:
        name = "outrider_files_unusable"
        assert (samples(metrics.address)[name, "--good"], samples(metrics.address)[name, "--bad"]) == (0, 0)
        replaced(bad, b"no number")
        assert (samples(metrics.address)[name, "--good"], samples(metrics.address)[name, "--bad"]) == (0, 1)
        bad.unlink()
        assert samples(metrics.address)[name, "--bad"] == 1
        replaced(bad, b"2")
        assert samples(metrics.address)[name, "--bad"] == 0
    finally:
        metrics.close()
    assert [files.current() for files in watched] == [1, 2]
