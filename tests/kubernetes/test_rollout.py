"""Rolling restarts and scaling, as Kubernetes would do them with our manifests: nobody who streams notices any."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from outrider.v1 import datastore_pb2, datastore_pb2_grpc
from tests.kubernetes.cluster import Cluster, running_cluster
from tests.kubernetes.load import Load, Observed, drain_times
from tests.kubernetes.objects import set_variables, shipped, with_secret
from tests.kubernetes.pod import Pod
from tests.support.manifests import Object, named

pytestmark = [pytest.mark.suite, pytest.mark.timeout(900)]

VERIFIER, SPECULATOR, DATASTORE, REDIS = "target-verifier", "draft-speculator", "retrieval-datastore", "redis"
SERVICES = (VERIFIER, SPECULATOR, DATASTORE)
NUM_APPLICATIONS = 8
NUM_TOKENS = 24
AGE_S = 2
"""So soon does a caller find a replica that is new."""
MIN_READY_S = 2
IN_A_HURRY = {"drain_timeout_s": "0", "max_connection_age_s": "15"}
"""A verifier that cuts off what it generates; few of its callers have found another by then."""


def on_two_cores(num_replicas: int, **verifier: str) -> list[Object]:
    """What is shipped, as far as two cores can hold it, in numbers that allow to compare texts. `verifier`: other
    settings of its."""
    objects = with_secret(shipped(), "redis", password="of-the-simulation")
    for name, prefix in zip(SERVICES, ("VERIFIER", "SPECULATOR", "DATASTORE"), strict=True):
        workload = named(objects, "Deployment", name)
        variables = {f"OUTRIDER_{prefix}_MAX_CONNECTION_AGE_S": str(AGE_S)}
        if name != DATASTORE:
            variables |= {f"OUTRIDER_{prefix}_NUM_THREADS": "1", f"OUTRIDER_{prefix}_DTYPE": "float32"}
        if name == VERIFIER:
            variables |= {f"OUTRIDER_VERIFIER_{field.upper()}": value for field, value in verifier.items()}
        set_variables(workload, variables)
        workload["spec"] |= {"replicas": num_replicas, "minReadySeconds": MIN_READY_S}
    return objects


class Rollout:
    """A cluster under load."""

    def __init__(self, cluster: Cluster, load: Load) -> None:
        self.cluster, self._load = cluster, load

    async def restart(self, *workloads: str) -> None:
        """A rolling restart of each of them, all at once."""
        self._load.begin(f"restart {', '.join(workloads)}")
        for workload in workloads:
            self.cluster.restart(workload)
        await self.cluster.settle(*workloads)

    async def scale(self, num_replicas: int, *workloads: str) -> None:
        """Another number of replicas of each of them."""
        self._load.begin(f"scale to {num_replicas}")
        for workload in workloads:
            self.cluster.scale(workload, num_replicas)
        await self.cluster.settle(*workloads)

    async def all_work(self, *workloads: str, timeout_s: float = 60.0) -> None:
        """Returns when every pod of these has been given work. TimeoutError: one of them is given none."""
        async with asyncio.timeout(timeout_s):
            for workload in workloads:
                for pod in self.cluster.ready(workload):
                    while not await has_worked(workload, pod):  # noqa: ASYNC110 - there is no event for it
                        await asyncio.sleep(0.2)


async def has_worked(workload: str, pod: Pod) -> bool:
    """Whether a pod has been given sessions, or asked."""
    if workload != DATASTORE:
        return b"session.started" in pod.log.read_bytes()
    async with grpc.aio.insecure_channel(f"{pod.place.address}:50053") as channel:
        stub = datastore_pb2_grpc.DatastoreServiceStub(channel)
        return (await stub.GetInfo(datastore_pb2.DatastoreServiceGetInfoRequest())).num_lookups > 0


def judge(cluster: Cluster, observed: dict[str, Observed]) -> None:
    """Nobody noticed, and every pod ended by itself."""
    for scenario, seen in observed.items():
        print(f"{scenario}: {seen}")
    for line in drain_times([(ending.workload, ending.drain_s) for ending in cluster.endings]).items():
        print("from SIGTERM to the end: {}: {}".format(*line))
    assert not [failure for seen in observed.values() for failure in seen.failures]
    assert not [wrong for seen in observed.values() for wrong in seen.wrong]
    assert not [ending for ending in cluster.endings if ending.was_killed or ending.status]
    assert not [pod.place.name for pods in cluster.pods.values() for pod in pods if pod.num_restarts]


async def test_nobody_notices_a_hasty_restart_or_a_change_of_scale(tmp_path: Path) -> None:
    """Generations are cut off, and go on elsewhere."""
    async with running_cluster(on_two_cores(1, **IN_A_HURRY), tmp_path) as cluster:
        load = Load(cluster.target(VERIFIER, 50051), NUM_APPLICATIONS, NUM_TOKENS)
        await load.start()
        rollout = Rollout(cluster, load)
        await rollout.restart(*SERVICES)
        await rollout.scale(2, *SERVICES)
        await rollout.all_work(*SERVICES)
        await rollout.scale(1, *SERVICES)
        observed = await load.stop()
        judge(cluster, observed)
        assert sum(seen.num_resumes for seen in observed.values()) > 0


async def test_nobody_notices_restart_after_restart_of_all_that_is_shipped(tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("takes minutes: --full")
    async with running_cluster(on_two_cores(2), tmp_path) as cluster:
        load = Load(cluster.target(VERIFIER, 50051), NUM_APPLICATIONS, NUM_TOKENS)
        await load.start()
        rollout = Rollout(cluster, load)
        for service in SERVICES:
            await rollout.restart(service)
        await rollout.restart(REDIS)
        for _ in range(2):
            await rollout.restart(*SERVICES)
        await rollout.scale(3, *SERVICES)
        await rollout.all_work(*SERVICES)
        await rollout.scale(2, *SERVICES)
        judge(cluster, await load.stop())
