"""The gateway as a process: its output, its drain, its files."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from tests.support.certificates import Authority
from tests.support.fake_verifier import FakeVerifier, chunk, finished, started, until_cancelled
from tests.support.gateways import running_gateway
from tests.support.processes import gateway_process

pytestmark = pytest.mark.slow


async def test_a_first_signal_lets_streams_end(verifier: FakeVerifier) -> None:
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        yield chunk(5, text="before")
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(30)
        yield chunk(6, text="after")
        yield finished(2)

    verifier.script = script
    async with (
        gateway_process("--upstream", verifier.address) as (running, address),
        httpx.AsyncClient(timeout=30) as http,
    ):
        async with http.stream(
            "POST", f"http://{address}/v1/completions", json={"prompt": "a", "stream": True}
        ) as response:
            lines = response.aiter_lines()
            assert "before" in await anext(lines)
            running.send_signal(signal.SIGTERM)
            while True:
                try:
                    _, writer = await asyncio.open_connection(*address.split(":"))
                    writer.close()
                    await asyncio.sleep(0.01)
                except ConnectionError:  # refused, or reset: it was waiting to be accepted when the port was closed
                    break
            go.set()
            rest = [line async for line in lines]
        assert any("after" in line for line in rest)
        assert rest[-2] == "data: [DONE]"
        assert await running.wait() == 0


async def test_a_second_signal_cuts_streams_off(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    async with (
        gateway_process("--upstream", verifier.address) as (running, address),
        httpx.AsyncClient(timeout=30) as http,
    ):

        async def read() -> None:
            body = {"prompt": "a", "stream": True}
            async with http.stream("POST", f"http://{address}/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                running.send_signal(signal.SIGTERM)
                assert running.stderr is not None
                while b"draining" not in await running.stderr.readline():
                    pass
                running.send_signal(signal.SIGTERM)
                async for _ in lines:
                    pass

        with pytest.raises(httpx.HTTPError):
            await read()
        assert await running.wait() == 0
        assert await asyncio.to_thread(verifier.ended.wait, 10)


async def test_a_changed_certificate_is_shown_from_then_on(verifier: FakeVerifier, tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    cert, key = old.issue("gateway").write(tmp_path, "gateway")
    async with running_gateway(verifier.address, tls_cert=str(cert), tls_key=str(key)) as gateway:
        for authority in (old, new):
            authority.issue("gateway").write(tmp_path, "gateway")
            trusted = ssl.create_default_context(cadata=authority.pem.decode())
            async with httpx.AsyncClient(verify=trusted) as http:
                assert (await http.get(f"https://{gateway.address}/ping")).status_code == 200


async def test_a_client_without_a_certificate_is_not_heard_where_one_is_needed(
    verifier: FakeVerifier, tmp_path: Path
) -> None:
    authority, other = Authority("ours"), Authority("other")
    cert, key = authority.issue("gateway").write(tmp_path, "gateway")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    settings = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(tmp_path / "ca.pem")}
    async with running_gateway(verifier.address, **settings) as gateway:
        for issuer, is_heard in ((None, False), (other, False), (authority, True)):
            trusted = ssl.create_default_context(cadata=authority.pem.decode())
            if issuer is not None:
                trusted.load_cert_chain(*issuer.issue("client").write(tmp_path, "client"))
            async with httpx.AsyncClient(verify=trusted) as http:
                if is_heard:
                    assert (await http.get(f"https://{gateway.address}/ping")).status_code == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        await http.get(f"https://{gateway.address}/ping")
