"""The simulated cluster does what Kubernetes does: where it did less, a rollout would look safer than it is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dnslib import RCODE, DNSRecord

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.controllers import deployment_steps, is_rolled_out, revision_of, stateful_set_steps
from tests.support.manifests import Object
from tests.support.waiting import until

LABELS = {"app": "x"}


@dataclass
class Seen:
    """A pod, as a controller sees it."""

    revision: str
    is_available_now: bool = True
    is_terminating: bool = False
    ordinal: int = 0
    created_at: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        return self.is_available_now and not self.is_terminating

    def is_available(self, min_ready_s: float) -> bool:
        return self.is_ready


def workload(kind: str = "Deployment", **spec: Any) -> Object:
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": []}}
    return {"kind": kind, "metadata": {"name": "x"}, "spec": {"template": template, **spec}}


def rolling(num_replicas: int, max_surge: int | str, max_unavailable: int | str) -> Object:
    limits = {"maxSurge": max_surge, "maxUnavailable": max_unavailable}
    return workload(replicas=num_replicas, strategy={"rollingUpdate": limits})


@pytest.mark.parametrize(
    ("num_replicas", "max_surge", "max_unavailable", "least", "most"),
    [(2, 1, 0, 2, 3), (2, 0, 1, 1, 2), (4, "25%", "25%", 3, 5), (3, "25%", "25%", 3, 4), (1, 0, 0, 0, 1)],
)
def test_a_rolling_update_has_no_more_and_no_fewer_pods_than_it_may(
    num_replicas: int, max_surge: int | str, max_unavailable: int | str, least: int, most: int
) -> None:
    deployment = rolling(num_replicas, max_surge, max_unavailable)
    pods = [Seen("old") for _ in range(num_replicas)]
    for _ in range(100):
        if is_rolled_out(deployment, pods):
            break
        steps = deployment_steps(deployment, pods)
        pods = [pod for pod in pods if pod not in steps.doomed]
        assert sum(pod.is_ready for pod in pods) >= least
        waiting = [pod for pod in pods if not pod.is_available_now]
        if waiting and not steps.num_new and not steps.doomed:
            waiting[0].is_available_now = True
        pods += [Seen(revision_of(deployment), is_available_now=False) for _ in range(steps.num_new)]
        assert len(pods) <= most
    assert is_rolled_out(deployment, pods)


def test_no_old_pod_goes_before_a_new_one_is_available() -> None:
    deployment = rolling(2, 1, 0)
    new = Seen(revision_of(deployment), is_available_now=False)
    pods = [Seen("old"), Seen("old"), new]
    assert deployment_steps(deployment, pods).doomed == []
    new.is_available_now = True
    assert len(deployment_steps(deployment, pods).doomed) == 1


def test_a_pod_that_terminates_is_counted_no_more() -> None:
    deployment = rolling(2, 1, 0)
    pods = [Seen("old", is_terminating=True), Seen("old"), Seen(revision_of(deployment))]
    assert deployment_steps(deployment, pods).num_new == 1


def test_recreating_makes_nothing_before_the_old_pods_are_gone() -> None:
    deployment = workload(replicas=1, strategy={"type": "Recreate"})
    old = Seen("old")
    assert deployment_steps(deployment, [old]).doomed == [old]
    old.is_terminating = True
    assert deployment_steps(deployment, [old]).num_new == 0
    assert deployment_steps(deployment, []).num_new == 1


def test_of_too_many_pods_the_one_that_is_not_ready_goes_then_the_youngest() -> None:
    deployment = workload(replicas=1)
    first, second = (Seen(revision_of(deployment), created_at=at) for at in (1, 2))
    unready = Seen(revision_of(deployment), is_available_now=False, created_at=0)
    assert deployment_steps(deployment, [first, second, unready]).doomed == [unready, second]


def test_a_stateful_set_replaces_one_pod_at_a_time_from_the_last_on() -> None:
    stateful = workload("StatefulSet", replicas=2)
    pods = [Seen("old", ordinal=0), Seen("old", ordinal=1)]
    assert stateful_set_steps(stateful, pods).doomed == [pods[1]]
    pods[1].is_terminating = True
    assert stateful_set_steps(stateful, pods).doomed == []
    pods[1] = Seen(revision_of(stateful), ordinal=1, is_available_now=False)
    assert stateful_set_steps(stateful, pods).doomed == []
    pods[1].is_available_now = True
    assert stateful_set_steps(stateful, pods).doomed == [pods[0]]
    assert stateful_set_steps(stateful, pods[1:]).ordinals == [0]


SERVER = """
import asyncio, os, signal, sys
async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), os.environ["HOST"], 8080)
    if "deaf" in sys.argv:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    print("serves", os.environ["WORD"], flush=True)
    if "short" in sys.argv:
        await asyncio.sleep(0.2)
        raise SystemExit(3)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def serving(*arguments: str, grace_s: int = 30, sleep_s: int = 0, **container: Any) -> list[Object]:
    """A service of one pod, which listens."""
    container = {
        "name": "x",
        "command": [sys.executable, "-c", SERVER, *arguments],
        "env": [
            {"name": "HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}},
            {"name": "WORD", "value": "$(SECRET)-$$(SECRET)"},
        ],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 0.1},
        "lifecycle": {"preStop": {"sleep": {"seconds": sleep_s}}},
    } | container
    deployment = workload(replicas=1, strategy={"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    deployment["spec"]["template"]["spec"] = {"containers": [container], "terminationGracePeriodSeconds": grace_s}
    service = {"kind": "Service", "metadata": {"name": "x"}, "spec": {"clusterIP": "None", "selector": LABELS}}
    return [deployment, service, {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"word": "word"}}]


@asynccontextmanager
async def started(objects: list[Object], folder: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(objects, folder, cache_s=0.0)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


class Resolver(asyncio.DatagramProtocol):
    """One question to a name server."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[DNSRecord] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        self.answer.set_result(DNSRecord.parse(data))


async def addresses_of(cluster: Cluster, name: str, kind: str = "A") -> list[str] | None:
    """What the name means; None = there is no such name."""
    loop = asyncio.get_running_loop()
    transport, resolver = await loop.create_datagram_endpoint(Resolver, remote_addr=("127.0.0.1", cluster.names.port))
    transport.sendto(DNSRecord.question(name, kind).pack())
    async with asyncio.timeout(5):
        answer = await resolver.answer
    transport.close()
    return None if answer.header.rcode == RCODE.NXDOMAIN else [str(record.rdata) for record in answer.rr]


@pytest.mark.slow
async def test_a_name_means_the_pods_that_are_ready_and_do_not_terminate(tmp_path: Path) -> None:
    async with started(serving(sleep_s=5), tmp_path) as cluster:
        assert await addresses_of(cluster, "x") is None
        await cluster.settle(timeout_s=20)
        [pod] = cluster.pods["x"]
        assert await addresses_of(cluster, "x") == [pod.place.address]
        assert await addresses_of(cluster, "x", "AAAA") == []
        assert b"serves word-$(SECRET)" in pod.log.read_bytes()
        pod.delete()
        assert await addresses_of(cluster, "x") is None
        cluster.objects[1]["spec"]["publishNotReadyAddresses"] = True
        assert pod.place.address in (await addresses_of(cluster, "x") or [])


@pytest.mark.slow
async def test_the_hook_comes_first_and_a_pod_that_ends_is_not_killed(tmp_path: Path) -> None:
    async with started(serving(sleep_s=1), tmp_path) as cluster:
        await cluster.settle(timeout_s=20)
        began = time.monotonic()
        cluster.pods["x"][0].delete()
        await until(lambda: cluster.endings)
        [ending] = cluster.endings
        assert time.monotonic() - began >= 1
        assert not ending.was_killed
        assert ending.drain_s < 5
        assert 28 < ending.grace_s <= 29


@pytest.mark.slow
async def test_who_outlasts_the_grace_is_killed_and_reported(tmp_path: Path) -> None:
    async with started(serving("deaf", grace_s=3, sleep_s=1), tmp_path) as cluster:
        await cluster.settle(timeout_s=20)
        began = time.monotonic()
        cluster.pods["x"][0].delete()
        await until(lambda: cluster.endings)
        assert cluster.endings[0].was_killed
        assert 2.9 < time.monotonic() - began < 10


NOBODY = {"tcpSocket": {"port": 8081}, "periodSeconds": 0.1, "failureThreshold": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        (serving("short"), "ended with status 3"),
        (serving(livenessProbe=NOBODY), "liveness probe has failed"),
        (serving(startupProbe=NOBODY), "startup probe has failed"),
    ],
    ids=["ended", "not alive", "not started"],
)
async def test_who_ends_or_is_not_alive_is_started_again_in_the_same_place(
    tmp_path: Path, objects: list[Object], reason: str
) -> None:
    async with started(objects, tmp_path) as cluster:
        await until(lambda: any(pod.pid for pod in cluster.pods["x"]))
        [pod] = cluster.pods["x"]
        first = pod.pid
        await until(lambda: pod.num_restarts and pod.pid not in (0, first))
        assert reason in pod.log.read_text()
        assert cluster.pods["x"] == [pod]


@pytest.mark.slow
async def test_nobody_is_ready_who_has_not_started(tmp_path: Path) -> None:
    patient = NOBODY | {"failureThreshold": 1000}
    async with started(serving(startupProbe=patient), tmp_path) as cluster:
        await until(lambda: any(b"serves" in pod.log.read_bytes() for pod in cluster.pods["x"] if pod.pid))
        assert not cluster.pods["x"][0].is_ready


@pytest.mark.slow
async def test_an_answer_of_the_name_server_may_be_old(tmp_path: Path) -> None:
    cluster = Cluster(serving(), tmp_path, cache_s=3600.0)
    await cluster.start()
    try:
        assert await addresses_of(cluster, "x") is None
        await cluster.settle(timeout_s=20)
        assert await addresses_of(cluster, "x") is None
    finally:
        await cluster.stop()
