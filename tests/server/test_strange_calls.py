"""A call that no client of ours would make ends for its caller, and for nobody else. A server that ends takes its
process with it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.support.idle_service import NAME, Idle, is_serving, serving


@pytest.mark.parametrize(
    "method", [f"/{NAME}/Generate".encode() + b"\xc4\x83\x86", b"/\xff\xfe", b"/", b"//", "/é/è".encode(), b"/a" * 2000]
)
async def test_a_method_of_any_name_is_no_end_of_the_server(method: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    def call(address: str) -> None:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(method)(b"", timeout=2)

    async with serving(Idle(), capsys) as (address, task, _):
        for _ in range(3):
            await asyncio.to_thread(call, address)
        assert await is_serving(address)
        assert not task.done()


async def test_a_server_that_ends_by_itself_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    service = Idle()
    async with serving(service, capsys) as (address, task, _):
        assert await is_serving(address)
        assert service.server is not None
        await service.server.stop(None)
        assert await task == "error: the gRPC server has ended by itself"
