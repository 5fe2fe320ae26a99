"""The services under test: a stack of our own, or a verifier that runs already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from grpc import aio

from outrider.security.tokens import CallsWithMetadata
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_bench.config import BenchConfig
from outrider_bench.drivers import StackDriver, wire_name
from outrider_cli.links.line import LinkSettings
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_client.channel import NO_SECURITY, ChannelSecurity, open_aio
from outrider_client.requests import method_name

_ANSWER_TIMEOUT_S = 10.0


class StackError(RuntimeError):
    """The services could not be started, or do not answer."""


@dataclass(frozen=True, slots=True)
class Services:
    """Services of our own that serve."""

    stack: LocalStack
    driver: StackDriver
    info: verifier_pb2.GetInfoResponse
    """What the verifier says of itself."""


@asynccontextmanager
async def running_stack(
    config: BenchConfig, rtt_ms: float, security: ChannelSecurity = NO_SECURITY
) -> AsyncIterator[tuple[StackDriver, verifier_pb2.GetInfoResponse]]:
    """A driver for the services while the block runs, and what the verifier says of itself. Raises StackError."""
    if config.address is None:
        async with running_services(stack_config(config, rtt_ms)) as services:
            _check_methods(config, services.info)
            yield services.driver, services.info
    else:
        async with connected(config.address, security) as (driver, info):
            _check_methods(config, info)
            yield driver, info


@asynccontextmanager
async def running_services(config: StackConfig) -> AsyncIterator[Services]:
    """Services of our own while the block runs. Raises StackError."""
    try:
        # Blocks the event loop on purpose: the processes live as long as the thread that starts them, and nothing else
        # runs yet.
        with LocalStack(config) as stack:
            async with connected(stack.address) as (driver, info):
                yield Services(stack, driver, info)
    except (ProcessFailed, RedisFailed, RedisNotFound) as error:
        raise StackError(str(error)) from None


@asynccontextmanager
async def connected(
    address: str, security: ChannelSecurity = NO_SECURITY
) -> AsyncIterator[tuple[StackDriver, verifier_pb2.GetInfoResponse]]:
    """A driver for a verifier that runs, and what it says of itself. Raises StackError if it does not answer."""
    async with open_aio(address, security.credentials_for(address)) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(cast(aio.Channel, CallsWithMetadata(channel, security.metadata)))
        info = await _info(stub, address)
        yield StackDriver(stub), info


def stack_config(config: BenchConfig, rtt_ms: float) -> StackConfig:
    """What to start. One thread a model: that is what the baselines have."""
    pins: dict[str, Any] = {}
    if config.cores:
        target, others = config.cores
        pins = {
            "verifier_arguments": ("--cpu", str(target)),
            "speculator_arguments": ("--cpu", str(others)),
        }
    return StackConfig(
        target=config.target,
        target_dtype=config.dtype,
        draft=config.draft,
        draft_dtype=config.draft_dtype,
        link=LinkSettings(delay_ms=rtt_ms / 2) if rtt_ms else None,
        num_threads=1,
        **pins,
    )


def describe_server(info: verifier_pb2.GetInfoResponse) -> dict[str, dict[str, Any]]:
    """The target model as a server tells it, for results about a server whose weights are not at hand."""
    return {"target": {"model_id": info.model.model_id, "dtype": info.model.dtype, "server_version": info.version}}


async def _info(stub: verifier_pb2_grpc.VerifierServiceAsyncStub, address: str) -> verifier_pb2.GetInfoResponse:
    try:
        return await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_ANSWER_TIMEOUT_S, wait_for_ready=True)
    except aio.AioRpcError as error:
        raise StackError(f"the verifier at {address} does not answer: {error.code().name}: {error.details()}") from None


def _check_methods(config: BenchConfig, info: verifier_pb2.GetInfoResponse) -> None:
    """A stack without a peer would refuse in the middle of the warm-up; this says it in terms of the flag."""
    offered = {types_pb2.Method.Name(number) for number in info.methods}
    for method in config.methods:
        if wire_name(method.partition("+")[0]) not in offered:
            known = ", ".join(sorted(map(method_name, info.methods)))
            raise StackError(f"--methods: the verifier does not offer {method!r} (it offers {known})")
