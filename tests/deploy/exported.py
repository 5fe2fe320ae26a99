"""The metrics of real services after some work: dashboards and alerts may query only these."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from prometheus_client.parser import text_string_to_metric_families

from outrider.datastore.service import DatastoreService
from outrider.datastore.settings import DatastoreSettings
from outrider.edge.service import EdgeService
from outrider.edge.settings import EdgeSettings
from outrider.security.watched_files import WatchedFiles
from outrider.server.export import ServiceMetrics
from outrider.server.run import Service
from outrider.speculator.service import SpeculatorService
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from outrider_cli.local.redis import running_redis
from outrider_client.client import Client
from tests.deploy.promql import Known
from tests.support.gateways import running_gateway

ANY = "127.0.0.1:0"
PROMPT = "def add(a, b):\n"
TARGET = frozenset({"job", "instance", "namespace", "pod"})
"""Labels that Prometheus always adds to what it scrapes in a cluster."""
TAKEN = TARGET | {"container", "service", "endpoint", "node", "cluster", "prometheus"}
"""Labels that it may add: a label of ours with such a name would be renamed."""

ENUMERATED = (
    "component",
    "peer",
    "direction",
    "phase",
    "reason",
    "method",
    "source",
    "tier",
    "position",
    "finish_reason",
)
"""Labels whose values are all exported from the start."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as a service exports it."""

    kind: str
    description: str
    series: Mapping[str, frozenset[str]]
    """Labels by the name of the series: with _bucket, _count, _sum for a histogram."""
    values: Mapping[str, frozenset[str]]
    """Values of each label."""


@cache
def exported() -> dict[str, dict[str, Family]]:
    """By service, by the name of the metric. Runs the services once for all tests of the process."""
    with TemporaryDirectory() as folder:
        texts = asyncio.run(_run(Path(folder)))
    return {service: _families(text) for service, text in texts.items()}


def known() -> Known:
    """What may be queried from the services of a cluster."""
    families = [family for service in exported().values() for family in service.values()]
    values: dict[str, frozenset[str]] = {}
    for label in ENUMERATED:
        values[label] = frozenset[str]().union(*(family.values.get(label, ()) for family in families))
    values["finish_reason"] |= {""}
    # Only some of them have occurred.
    values["code"] = frozenset(code.name for code in grpc.StatusCode)
    series: dict[str, frozenset[str]] = {}
    for family in families:
        for name, labels in family.series.items():
            # A gateway has no model to name, but a query may use the model of other services.
            series[name] = series.get(name, TARGET) | labels
    return Known(series, values)


async def _run(folder: Path) -> dict[str, str]:
    """All services, some work for each, and their metrics then."""
    file = folder / "file"
    file.write_bytes(b"1")
    watched = WatchedFiles("--tls-cert, --tls-key", [file], b"".join)
    async with AsyncExitStack() as stack:
        redis_url = stack.enter_context(running_redis(folder))
        datastore = DatastoreService(DatastoreSettings(redis_url=redis_url, lookup_timeout_ms=5000))
        store, store_metrics = await stack.enter_async_context(_running(datastore))
        speculator = SpeculatorService(SpeculatorSettings(datastore=store))
        drafts, draft_metrics = await stack.enter_async_context(_running(speculator))
        verifier = VerifierService(
            VerifierSettings(model="demo/target", dtype="float32", speculator=drafts, datastore=store)
        )
        target, target_metrics = await stack.enter_async_context(_running(verifier))
        loaded = asyncio.Event()
        edge = EdgeService(EdgeSettings(upstream=target), loaded.set)
        near, edge_metrics = await stack.enter_async_context(_running(edge))
        await loaded.wait()
        gateway = await stack.enter_async_context(running_gateway(target, lenient=True))
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "cache_prompt": True}
        (await gateway.post("/v1/completions", **body)).raise_for_status()
        assert (await gateway.post("/v1/completions")).status_code == 400
        for address, methods in ((target, ("off", "best-first", "retrieval", "auto")), (near, ("pearl",))):
            async with Client(address) as client:
                for method in methods:
                    await client.complete(PROMPT, max_tokens=24, ignore_eos=True, method=method)
        read = {
            "datastore": store_metrics,
            "speculator": draft_metrics,
            "verifier": target_metrics,
            "edge": edge_metrics,
            "gateway": gateway.address,
        }
        texts = {name: await asyncio.to_thread(_scrape, address) for name, address in read.items()}
    assert watched.current() == b"1"
    return texts


@asynccontextmanager
async def _running(service: Service) -> AsyncIterator[tuple[str, str]]:
    """Its address, and the address of its metrics."""
    server = grpc.aio.server()
    service.register(server)
    port = server.add_insecure_port(ANY)
    metrics = ServiceMetrics(service.metrics, ANY, bool)
    await server.start()
    try:
        await service.load()
        yield f"127.0.0.1:{port}", metrics.address
    finally:
        await server.stop(0)
        await asyncio.to_thread(metrics.close)
        await service.close()


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def _families(text: str) -> dict[str, Family]:
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        series: dict[str, frozenset[str]] = {}
        values: dict[str, frozenset[str]] = {}
        for sample in family.samples:
            series[sample.name] = series.get(sample.name, frozenset()) | sample.labels.keys()
            for label, value in sample.labels.items():
                values[label] = values.get(label, frozenset()) | {value}
        found[name] = Family(family.type, family.documentation, series, values)
    return found
