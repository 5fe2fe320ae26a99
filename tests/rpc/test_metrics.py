"""Numbers for Prometheus, as it reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.rpc.metrics import Histogram, Metric, MetricsServer
from outrider.rpc.settings import MeasuredSettings, model_config, parse_settings

COUNTED = {"lookups": 1}


class Settings(MeasuredSettings):
    """Those of a service."""

    model_config = model_config("test")


def read() -> Iterator[Metric | Histogram]:
    yield Metric("outrider_lookups_total", "Lookups.", "counter", values={"": COUNTED["lookups"]})
    yield Metric("outrider_hits_total", "Hits.", "counter", "tier", {"prior": 3, "ring": 4})
    yield Metric("outrider_memory_bytes", "Memory.", "gauge", values={"": 5.5})
    yield Histogram("outrider_duration_seconds", "Durations.", (0.1, 0.5), (1, 2, 3), 7.25)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", read)
    yield server
    server.close()


def samples(address: str) -> dict[tuple[str, str], float]:
    """What Prometheus would store: by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_counters_gauges_and_histograms(server):
    assert samples(server.address) == {
        ("outrider_lookups_total", ""): 1,
        ("outrider_hits_total", "prior"): 3,
        ("outrider_hits_total", "ring"): 4,
        ("outrider_memory_bytes", ""): 5.5,
        ("outrider_duration_seconds_bucket", "0.1"): 1,
        ("outrider_duration_seconds_bucket", "0.5"): 3,
        ("outrider_duration_seconds_bucket", "+Inf"): 6,
        ("outrider_duration_seconds_count", ""): 6,
        ("outrider_duration_seconds_sum", ""): 7.25,
    }


def test_each_reading_is_of_that_moment(server, monkeypatch):
    monkeypatch.setitem(COUNTED, "lookups", 41)
    assert samples(server.address)["outrider_lookups_total", ""] == 41


def test_a_port_that_is_taken_is_an_error(server):
    with pytest.raises(OSError, match="in use"):
        MetricsServer(server.address, read)


@pytest.mark.parametrize("value", ["9090", "host:", "host:99999", "host:port"])
def test_a_wrong_address_is_refused_with_the_flag(value, capsys):
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--metrics-listen", value])
    assert "--metrics-listen (or OUTRIDER_TEST_METRICS_LISTEN): must be HOST:PORT" in capsys.readouterr().err


def test_no_address_is_no_server():
    assert parse_settings(Settings, []).metrics_listen == ""
