"""Probes, asked as the kubelet asks them: over a connection of their own, with their periods and thresholds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kubernetes.containers import Start

Json = Mapping[str, Any]

NO_REUSE = [("grpc.use_local_subchannel_pool", 1)]


class Probe:
    """One probe of one container."""

    def __init__(self, spec: Json, container: Json, address: str, program: Start | None = None) -> None:
        """`address`: of the pod. `program`: what an exec probe runs."""
        self._spec, self._container, self._address, self._program = spec, container, address, program
        self._period_s: float = spec.get("periodSeconds", 10)
        self._timeout_s: float = spec.get("timeoutSeconds", 1)
        self._delay_s: float = spec.get("initialDelaySeconds", 0)
        self._num_successes: int = spec.get("successThreshold", 1)
        self._num_failures: int = spec.get("failureThreshold", 3)

    async def run(self, told: Callable[[bool], None]) -> None:
        """Asks for ever. `told` hears True when enough answers in a row were good, False when enough were bad; each
        time anew."""
        await asyncio.sleep(self._delay_s)
        was_good, count = None, 0
        while True:
            is_good = await self._ask()
            count = count + 1 if is_good is was_good else 1
            was_good = is_good
            if count >= (self._num_successes if is_good else self._num_failures):
                told(is_good)
            await asyncio.sleep(self._period_s)

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                if "grpc" in self._spec:
                    return await self._ask_grpc()
                if "httpGet" in self._spec:
                    return await self._ask_http()
                if "tcpSocket" in self._spec:
                    return await self._ask_tcp()
                return await self._ask_program()
        except (TimeoutError, OSError, grpc.aio.AioRpcError):
            return False

    async def _ask_grpc(self) -> bool:
        target = f"{self._address}:{self._port(self._spec['grpc']['port'])}"
        async with grpc.aio.insecure_channel(target, options=NO_REUSE) as channel:
            request = health_pb2.HealthCheckRequest(service=self._spec["grpc"].get("service", ""))
            response = await health_pb2_grpc.HealthStub(channel).Check(request)
            return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask_tcp(self) -> bool:
        _, writer = await asyncio.open_connection(self._address, self._port(self._spec["tcpSocket"]["port"]))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def _ask_http(self) -> bool:
        spec = self._spec["httpGet"]
        if spec.get("scheme", "HTTP") != "HTTP":
            raise ValueError(f"probe by {spec['scheme']}: only HTTP is known")
        reader, writer = await asyncio.open_connection(self._address, self._port(spec["port"]))
        try:
            host = f"{self._address}:{self._port(spec['port'])}"
            writer.write(f"GET {spec['path']} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = (await reader.readline()).split(b" ")[1:2]
        finally:
            writer.close()
        return bool(status) and 200 <= int(status[0]) < 400

    async def _ask_program(self) -> bool:
        assert self._program is not None
        process = await asyncio.create_subprocess_exec(
            *self._program.command,
            env=self._program.variables,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(int(entry["containerPort"]) for entry in self._container["ports"] if entry["name"] == port)
