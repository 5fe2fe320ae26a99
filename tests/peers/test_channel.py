"""What a name resolves to, and which certificates its servers must have."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.peers.channel import PeerState, addresses_behind
from outrider.security.peer_channel import PeerSecurity
from tests.support.certificates import Authority, replaced


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, in place of the system's resolver."""
    names: dict[str, list[str]] = {}

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        if host not in names:
            raise socket.gaierror
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in each], socket.SOCK_STREAM, 6, "", (each, port)) for each in names[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lambda self, *given, **more: getaddrinfo(*given, **more))
    return names


async def test_a_name_stands_for_its_addresses_of_one_family(resolver: dict[str, list[str]]) -> None:
    resolver["both.test"] = ["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"]
    resolver["six.test"] = ["fd00::2", "fd00::1"]
    for target in ("both.test:50052", "dns:///both.test:50052"):
        assert await addresses_behind(target) == ["10.0.0.1:50052", "10.0.0.2:50052"]
    assert await addresses_behind("six.test:1") == ["[fd00::1]:1", "[fd00::2]:1"]


@pytest.mark.parametrize(
    "target",
    ["nobody.test:1", "10.0.0.1:1", "[::1]:1", "dns://10.0.0.9/x.test:1", "ipv4:10.0.0.1:1", "unix:/x", "x.test", ""],
)
async def test_what_is_no_name_and_what_is_not_found_stands_for_nothing(
    resolver: dict[str, list[str]], target: str
) -> None:
    resolver["x.test"] = resolver["10.0.0.1"] = resolver["::1"] = ["10.0.0.1", "10.0.0.2"]
    assert await addresses_behind(target) == []


async def test_who_is_dialled_by_address_must_have_a_certificate_for_the_name(tmp_path: Path) -> None:
    authority = Authority("ca")
    pair = authority.issue("speculator.test")
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    # An address that the certificate does not name.
    port = server.add_secure_port("127.0.0.2:0", grpc.ssl_server_credentials([(pair.key, pair.cert)]))
    await server.start()
    security = PeerSecurity(str(replaced(tmp_path / "ca", authority.pem)))
    codes = {}
    for host in ("speculator.test", "another.test", ""):
        state = PeerState("speculator", f"127.0.0.2:{port}", security, host)
        call = state.stub(health_pb2_grpc.HealthStub).Check(health_pb2.HealthCheckRequest(), timeout=10)
        codes[host] = await call.code()
        await state.close()
    await server.stop(0)
    assert codes == {
        "speculator.test": grpc.StatusCode.OK,
        "another.test": grpc.StatusCode.UNAVAILABLE,
        "": grpc.StatusCode.UNAVAILABLE,
    }
