"""The services under fire, as processes, and checks of their health."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import datastore_pb2_grpc, speculator_pb2, speculator_pb2_grpc, types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import LocalStack, StackConfig
from tests.fuzz.examples import rpcs

IDLE_S = 15.0
"""Maximum time for the sessions of cut-off calls to end."""
ANSWER_S = 30.0
SIGNS = re.compile(
    r"Traceback|rpc\.failed|step_failed|session_failed|ring\.failed|upkeep\.failed|"
    r"never retrieved\n(?!future: <Task finished .*async_generator_athrow)"
)
"""What a server logs after an unforeseen error. (A request iterator that grpc.aio closes while it runs is noise of that
library's.)"""


def stack_config(log_folder: Path) -> StackConfig:
    """A small target, and nothing pinned, because the machine is shared."""
    return StackConfig(target="demo/target", target_dtype="float32", log_folder=log_folder, cores=())


class Servers:
    """The processes of a stack, with a channel to each. Must be entered on the loop that calls them."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._marks = {process.name: process.log.stat().st_size for process in stack.processes}
        self.addresses = {process.name: process.address for process in stack.processes}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.model = types_pb2.ModelInfo()

    async def __aenter__(self) -> Servers:
        for name, address in self.addresses.items():
            self.channels[name] = grpc.aio.insecure_channel(address)
        info = await VerifierServiceStub(self.channels["verifier"]).GetInfo(verifier_pb2.GetInfoRequest())
        self.model = info.model
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self.channels.values():
            await channel.close()

    @property
    def memory_mb(self) -> dict[str, int]:
        """Resident memory of each process."""
        return {each.name: _process_of(each).memory_info().rss >> 20 for each in self._stack.processes}

    async def problems(self) -> list[str]:
        """What is wrong with them, or an empty text: they serve good calls, hold no session and logged no bug."""
        found = [f"the {process.name} has ended" for process in self._stack.processes if not process.is_running]
        if found:
            return found
        for name, channel in self.channels.items():
            if not await _is_serving(channel):
                found.append(f"the {name} does not say that it serves")
        for check in (self._generates, self._drafts, self._looks_up, self._is_idle):
            try:
                async with asyncio.timeout(ANSWER_S):
                    found += await check()
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                found.append(f"{check.__name__.strip('_')}: {type(error).__name__} {error}")
        return found + self._logged()

    async def _generates(self) -> list[str]:
        request = verifier_pb2.GenerateRequest(
            prompt={"text": "def add(a, b):\n"},
            sampling={"temperature": 0.0, "max_tokens": 4, "ignore_eos": True},
            speculation={"method": types_pb2.METHOD_PEARL},
        )
        token_ids: list[int] = []
        async for response in VerifierServiceStub(self.channels["verifier"]).Generate(request):
            token_ids += response.chunk.token_ids
        return [] if len(token_ids) == 4 else [f"the verifier generates {len(token_ids)} tokens in place of 4"]

    async def _drafts(self) -> list[str]:
        opening = rpcs(self.model)["speculator/Speculate"].first(Random(0))
        call: Any = speculator_pb2_grpc.SpeculatorServiceStub(self.channels["speculator"]).Speculate()
        await call.write(opening)
        while not any(session.HasField("draft") for session in (await call.read()).sessions):
            pass
        call.cancel()
        return []

    async def _looks_up(self) -> list[str]:
        request: Any = rpcs(self.model)["datastore/Lookup"].first(Random(0))
        stub = datastore_pb2_grpc.DatastoreServiceStub(self.channels["datastore"])
        answers = [response async for response in stub.Lookup(iter([request]))]
        return [] if len(answers) == 1 else ["the datastore does not answer a lookup"]

    async def _is_idle(self) -> list[str]:
        stubs: list[Any] = [
            VerifierServiceStub(self.channels["verifier"]),
            speculator_pb2_grpc.SpeculatorServiceStub(self.channels["speculator"]),
        ]
        requests = [verifier_pb2.GetInfoRequest(), speculator_pb2.SpeculatorServiceGetInfoRequest()]
        left = [1, 1]
        loop = asyncio.get_running_loop()
        until = loop.time() + IDLE_S
        while any(left) and loop.time() < until:
            left = [(await stub.GetInfo(request)).num_sessions for stub, request in zip(stubs, requests, strict=True)]
            await asyncio.sleep(0.02)
        names = ("verifier", "speculator")
        return [f"the {name} holds {num} sessions" for name, num in zip(names, left, strict=True) if num]

    def _logged(self) -> list[str]:
        """New lines of the logs that show a bug."""
        found = []
        for child in self._stack.processes:
            with child.log.open("rb") as log:
                log.seek(self._marks[child.name])
                text = log.read().decode(errors="replace")
                self._marks[child.name] = log.tell()
            found += [
                f"the {child.name} logged: ...{text[max(0, sign.start() - 300) : sign.end() + 2500]}"
                for sign in list(SIGNS.finditer(text))[:2]
            ]
        return found


def _process_of(child: ManagedProcess) -> psutil.Process:
    """The service itself: the child may be the process that supervises it."""
    process = psutil.Process(child.pid)
    return max([process, *process.children(recursive=True)], key=lambda each: each.memory_info().rss)


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    request = health_pb2.HealthCheckRequest(service="")
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
