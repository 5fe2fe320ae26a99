"""A small cluster on this machine: pods are processes with loopback addresses of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kubernetes.containers import Place
from tests.kubernetes.controllers import deployment_steps, is_rolled_out, revision_of, stateful_set_steps
from tests.kubernetes.objects import workloads
from tests.kubernetes.pod import Ending, Pod
from tests.support.manifests import Object, named
from tests.support.name_server import NameServer

TICK_S = 0.1
CACHE_S = 5.0
"""How old an answer of the cluster's name server may be: so long it keeps the records of a headless service."""


class Cluster:
    """Runs what the objects say, and goes on as they are changed. Lives on the event loop."""

    def __init__(self, objects: Sequence[Object], folder: Path, cache_s: float = CACHE_S) -> None:
        self.objects = list(objects)
        self.endings: list[Ending] = []
        self.pods: dict[str, list[Pod]] = {workload["metadata"]["name"]: [] for workload in workloads(objects)}
        """Of each workload."""
        self.logs: list[Path] = []
        """Of all pods that there ever were."""
        self.names = NameServer(self._endpoints, cache_s)
        self._folder = folder
        # Several clusters, of several users of a machine, have networks of their own.
        self._network = f"127.{16 + os.getpid() % 200}.{1 + os.getpid() // 200 % 250}"
        self._hosts, self._numbers = itertools.count(1), itertools.count(1)
        self._addresses: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def target(self, service: str, port: int) -> str:
        """A gRPC target that means all pods of a service."""
        return f"dns://127.0.0.1:{self.names.port}/{service}:{port}"

    def ready(self, workload: str) -> list[Pod]:
        """Its pods that take calls."""
        return [pod for pod in self.pods[workload] if pod.is_ready]

    def restart(self, workload: str) -> None:
        """As `kubectl rollout restart`: another template."""
        template = self._workload(workload)["spec"]["template"]
        annotations = template["metadata"].setdefault("annotations", {})
        annotations["restarts"] = str(1 + int(annotations.get("restarts", 0)))

    def scale(self, workload: str, num_replicas: int) -> None:
        """As `kubectl scale`."""
        self._workload(workload)["spec"]["replicas"] = num_replicas

    async def settle(self, *names: str, timeout_s: float = 120.0) -> None:
        """Returns when these workloads are as their objects say; none = all. TimeoutError, with the end of the logs."""
        wanted = names or tuple(self.pods)
        try:
            async with asyncio.timeout(timeout_s):
                while not all(is_rolled_out(self._workload(name), self.pods[name]) for name in wanted):
                    assert self._task is not None
                    if self._task.done():
                        self._task.result()
                    await asyncio.sleep(TICK_S)
        except TimeoutError:
            raise TimeoutError("\n".join(self._state(name) for name in wanted)) from None

    async def start(self) -> None:
        """Begins."""
        await self.names.start()
        self._task = asyncio.create_task(self._control())

    async def stop(self) -> None:
        """Ends everything at once."""
        if self._task is not None:
            self._task.cancel()
        self.names.stop()
        await asyncio.gather(*(pod.kill() for pods in self.pods.values() for pod in pods))

    async def _control(self) -> None:
        while True:
            for workload in workloads(self.objects):
                self._reconcile(workload)
            await asyncio.sleep(TICK_S)

    def _reconcile(self, workload: Object) -> None:
        name = workload["metadata"]["name"]
        pods = self.pods[name] = [pod for pod in self.pods[name] if not pod.is_gone]
        is_stateful = workload["kind"] == "StatefulSet"
        steps = stateful_set_steps(workload, pods) if is_stateful else deployment_steps(workload, pods)
        for _ in range(steps.num_new):
            self._make(workload, f"{name}-{revision_of(workload)[:5]}-{next(self._numbers)}")
        for ordinal in steps.ordinals:
            self._make(workload, f"{name}-{ordinal}").ordinal = ordinal
        for pod in steps.doomed:
            pod.delete()

    def _make(self, workload: Object, name: str) -> Pod:
        template = workload["spec"]["template"]
        folder = self._folder / f"{name}.{next(self._numbers)}"
        folder.mkdir(parents=True)
        place = Place(
            name,
            self._address(name if workload["kind"] == "StatefulSet" else ""),
            folder,
            self._folder / "claims",
            self.names.port,
            lambda service: self._address(f"{service}-0"),
        )
        labels = template["metadata"]["labels"]
        owner = workload["metadata"]["name"]
        pod = Pod(owner, revision_of(workload), labels, template["spec"], place, self.objects, self.endings.append)
        self.pods[owner].append(pod)
        self.logs.append(pod.log)
        return pod

    def _address(self, name: str) -> str:
        """The address of a pod; one with a name of its own, as those of a StatefulSet have, always has the same."""
        if name not in self._addresses or not name:
            self._addresses[name] = f"{self._network}.{next(self._hosts)}"
        return self._addresses[name]

    def _endpoints(self, service: str) -> list[str] | None:
        try:
            spec = named(self.objects, "Service", service)["spec"]
        except KeyError:
            return None
        selector = spec["selector"].items()
        return [
            pod.place.address
            for pods in self.pods.values()
            for pod in pods
            if selector <= pod.labels.items() and (pod.is_ready or spec.get("publishNotReadyAddresses"))
        ]

    def _workload(self, name: str) -> Object:
        return next(found for found in workloads(self.objects) if found["metadata"]["name"] == name)

    def _state(self, name: str) -> str:
        lines = []
        for pod in self.pods[name]:
            log = pod.log.read_text(errors="replace").splitlines()[-15:] if pod.log.exists() else []
            state = f"ready={pod.is_ready} terminating={pod.is_terminating} restarts={pod.num_restarts}"
            lines += [f"{pod.place.name}: {state}", *log]
        return "\n".join(lines) or f"{name}: no pods"


@asynccontextmanager
async def running_cluster(objects: Sequence[Object], folder: Path, cache_s: float = CACHE_S) -> AsyncIterator[Cluster]:
    """A cluster that has settled."""
    cluster = Cluster(objects, folder, cache_s)
    await cluster.start()
    try:
        await cluster.settle()
        yield cluster
    finally:
        await cluster.stop()
