"""A pod: its containers' processes from the first to the last, as the kubelet treats them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_cli.local.die_with_parent import die_with_parent
from tests.kubernetes.containers import Containers, Place
from tests.kubernetes.probes import Probe
from tests.support.manifests import Object

Json = Mapping[str, Any]

GRACE_S = 30
EXTRA_S = 2
"""What a process has after a preStop hook that took all of the grace."""
FIRST_BACKOFF_S = 10.0
LAST_BACKOFF_S = 300.0


@dataclass(frozen=True)
class Ending:
    """How a pod's process ended that was to end."""

    workload: str
    pod: str
    drain_s: float
    """From SIGTERM to the end."""
    grace_s: float
    """What was left of the grace at SIGTERM."""
    was_killed: bool
    """Whether the grace was over before."""
    status: int


class Pod:
    """One pod. Lives on the event loop."""

    def __init__(
        self,
        workload: str,
        revision: str,
        labels: Mapping[str, str],
        spec: Json,
        place: Place,
        objects: Sequence[Object],
        on_ending: Callable[[Ending], None],
    ) -> None:
        """`revision`: of the template that it was made by."""
        self.workload, self.revision, self.labels, self.place = workload, revision, dict(labels), place
        self.ready_since: float | None = None
        """By the loop's clock; None = it is not ready."""
        self.is_terminating = False
        self.is_gone = False
        self.num_restarts = 0
        self.ordinal = 0
        """Its number among those of a StatefulSet."""
        self.created_at = time.monotonic()
        self.log = place.folder / "log"
        self._spec, self._on_ending = spec, on_ending
        self._containers = Containers(spec, place, objects)
        [self._container] = spec["containers"]
        self._process: asyncio.subprocess.Process | None = None
        self._probing: asyncio.Task[None] | None = None
        self._running = asyncio.create_task(self._run())
        self._deleting: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is one of its service's endpoints. One that terminates is none."""
        return self.ready_since is not None and not self.is_terminating

    @property
    def pid(self) -> int:
        """Its process; 0 = there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def is_available(self, min_ready_s: float) -> bool:
        """Whether it has been ready for that long."""
        return self.is_ready and time.monotonic() - (self.ready_since or 0.0) >= min_ready_s

    def delete(self) -> None:
        """Begins to terminate it. Idempotent."""
        if self._deleting is None:
            self.is_terminating = True
            self._deleting = asyncio.create_task(self._delete())

    async def kill(self) -> None:
        """Ends it at once, whatever it does: for the end of a test."""
        for task in (self._running, self._probing, self._deleting):
            if task is not None:
                task.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            try:
                for container in self._spec.get("initContainers", ()):
                    await self._run_first(container)
                process = self._process = await self._start(self._container)
                probing = self._probing = asyncio.create_task(self._probe(process))
                await process.wait()
                probing.cancel()
            except InitFailed as error:
                self._note(str(error))
            self.ready_since = None
            if self.is_terminating:
                return
            self.num_restarts += 1
            self._note(f"ended with status {process.returncode if self._process else None}; again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(LAST_BACKOFF_S, 2 * backoff_s or FIRST_BACKOFF_S)

    async def _run_first(self, container: Json) -> None:
        if await (await self._start(container)).wait():
            raise InitFailed(f"init container {container['name']} of {self.place.name} has failed")

    async def _start(self, container: Json) -> asyncio.subprocess.Process:
        start = self._containers.start_of(container)
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *die_with_parent(start.command),
                env=start.variables,
                cwd=self.place.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _probe(self, process: asyncio.subprocess.Process) -> None:
        """Startup first; then readiness and liveness beside each other."""
        if startup := self._probe_of("startupProbe"):
            has_started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

            def told(is_good: bool) -> None:
                if not has_started.done():
                    has_started.set_result(is_good)

            asking = asyncio.create_task(startup.run(told))
            try:
                if not await has_started:
                    await self._restart(process, "startup")
                    return
            finally:
                asking.cancel()
        alive = asyncio.Event()
        probes = [asyncio.create_task(self._probe_of("readinessProbe", always=True).run(self._set_ready))]
        if liveness := self._probe_of("livenessProbe"):
            probes.append(asyncio.create_task(liveness.run(lambda is_good: None if is_good else alive.set())))
        try:
            await alive.wait()  # set = it is not
            await self._restart(process, "liveness")
        finally:
            for probe in probes:
                probe.cancel()

    def _probe_of(self, name: str, *, always: bool = False) -> Any:
        if (spec := self._container.get(name)) is None:
            return Always() if always else None
        program = None
        if "exec" in spec:
            program = self._containers.start_of({**self._container, "command": spec["exec"]["command"], "args": []})
        return Probe(spec, self._container, self.place.address, program)

    def _set_ready(self, is_good: bool) -> None:
        if not is_good:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = time.monotonic()

    async def _restart(self, process: asyncio.subprocess.Process, probe: str) -> None:
        self._note(f"{probe} probe has failed")
        self.ready_since = None
        # Its end ends the probing, which is where we are.
        await asyncio.shield(asyncio.create_task(self._terminate(process)))

    async def _delete(self) -> None:
        if self._process is None or self._process.returncode is not None:
            self._running.cancel()  # between two processes
        else:
            await self._terminate(self._process)
        await asyncio.gather(self._running, return_exceptions=True)
        if self._probing is not None:
            self._probing.cancel()
        self.is_gone = True

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over, which began before preStop."""
        grace_s: float = self._spec.get("terminationGracePeriodSeconds", GRACE_S)
        began = time.monotonic()
        pause_s = self._container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), min(pause_s, grace_s))
        left_s = max(EXTRA_S, grace_s - (time.monotonic() - began))
        signalled = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        was_killed = False
        try:
            await asyncio.wait_for(process.wait(), left_s)
        except TimeoutError:
            was_killed = True
            process.kill()
            await process.wait()
        drain_s = time.monotonic() - signalled
        assert process.returncode is not None
        self._on_ending(Ending(self.workload, self.place.name, drain_s, left_s, was_killed, process.returncode))

    def _note(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(f"kubelet: {line}\n")


class InitFailed(Exception):
    """An init container ended with a status other than 0."""


class Always:
    """A container without a readiness probe is ready."""

    async def run(self, told: Callable[[bool], None]) -> None:
        told(True)
        await asyncio.Event().wait()
