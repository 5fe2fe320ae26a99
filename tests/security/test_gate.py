"""Which callers get through to a server, by tokens and by certificates, for every kind of call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.core.params import InvalidParameter
from outrider.security.callers import Role, current_caller
from outrider.security.certificates import server_credentials
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.permissions import PERMISSIONS, permitted_roles
from outrider.security.tokens import CallsWithMetadata, bearer
from outrider.v1 import datastore_pb2, speculator_pb2, verifier_pb2
from outrider.wire.errors import rpc_errors
from tests.support.certificates import Authority, credentials_file, entry, replaced

SERVICE = "outrider.v1.VerifierService"
METHODS = {
    "unary_unary": f"/{SERVICE}/Tokenize",
    "unary_stream": f"/{SERVICE}/Generate",
    "stream_unary": f"/{SERVICE}/Detokenize",
    "stream_stream": f"/{SERVICE}/Collaborate",
}
"""Real names; this server implements each as another kind of call."""
UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def test_every_rpc_of_every_service_has_its_roles() -> None:
    files: list[FileDescriptor] = [
        verifier_pb2.DESCRIPTOR,
        speculator_pb2.DESCRIPTOR,
        datastore_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    ]
    services = [service for file in files for service in file.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    # Reflection under its final name, and a method of later health checks.
    later = {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Health/List"}
    assert set(PERMISSIONS) == methods | later


def test_health_and_reflection_are_for_those_who_may_call_the_service_itself() -> None:
    for method in ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
        assert permitted_roles(method, "outrider.v1.SpeculatorService") == {Role.DRAFT, Role.SERVICE}
        assert Role.DRAFT not in permitted_roles(method, SERVICE)
    assert not permitted_roles("/outrider.v1.VerifierService/NewOne", SERVICE)


async def whose(request: bytes, context: Any) -> bytes:
    caller = current_caller()
    return f"{request.decode()} of {caller.tenant if caller else None}".encode()


async def whose_in_a_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    with rpc_errors(context):
        async for request in requests:
            yield await whose(request, context)
            if request == b"wrong":
                raise InvalidParameter("request", "right", "wrong")


async def whose_is_the_first(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return await whose(await anext(aiter(requests)), context)


async def whose_is_written(request: bytes, context: Any) -> None:
    await context.write(await whose(request, context))


HANDLERS = {
    METHODS["unary_unary"]: grpc.unary_unary_rpc_method_handler(whose),  # type: ignore[arg-type]
    METHODS["unary_stream"]: grpc.unary_stream_rpc_method_handler(whose_is_written),  # type: ignore[arg-type]
    METHODS["stream_unary"]: grpc.stream_unary_rpc_method_handler(whose_is_the_first),  # type: ignore[arg-type]
    METHODS["stream_stream"]: grpc.stream_stream_rpc_method_handler(whose_in_a_stream),  # type: ignore[arg-type]
}


class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return HANDLERS.get(str(handler_call_details.method))


@asynccontextmanager
async def serving(file: Path, tls: grpc.ServerCredentials | None = None) -> AsyncIterator[str]:
    """The address of a server behind a gate."""
    gate = Gate(credential_book(str(file), has_client_certificates=tls is not None), SERVICE)
    server = grpc.aio.server(interceptors=[gate])
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0") if tls is None else server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


LOST_STATUS = "Internal error from Core"
"""grpc.aio's details, which replace those of a server that ends a stream while the client is writing (grpc#36066)."""


async def answer(channel: Any, kind: str, *metadata: tuple[str, str], method: str = "") -> bytes | grpc.StatusCode:
    """The answer to one message, or the status."""
    request = iter([b"this"]) if kind.startswith("stream") else b"this"
    call = getattr(channel, kind)(method or METHODS[kind])(request, metadata=metadata, timeout=10)
    try:
        if kind.endswith("unary"):
            return bytes(await call)
        [response] = [response async for response in call]
        return bytes(response)
    except grpc.aio.AioRpcError as error:
        if error.details() == LOST_STATUS:
            return await answer(channel, kind, *metadata, method=method)
        return error.code()


@pytest.mark.parametrize("kind", METHODS)
async def test_a_call_passes_with_the_token_of_its_role_and_is_its_tenants(kind: str, tmp_path: Path) -> None:
    file = credentials_file(
        tmp_path / "c", entry("good", "draft", "generate", tenant="acme"), entry("other", "retrieve", "draft", "manage")
    )
    async with serving(file) as address, grpc.aio.insecure_channel(address) as channel:
        assert await answer(channel, kind, *bearer("good")) == b"this of acme"
        assert await answer(channel, kind, ("authorization", "bearer  good")) == b"this of acme"
        assert await answer(channel, kind, *bearer("other")) is PERMISSION_DENIED
        for wrong in ((), bearer("goo"), bearer(""), (("authorization", "good"),), (*bearer("good"), *bearer("good"))):
            assert await answer(channel, kind, *wrong) is UNAUTHENTICATED, wrong


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "no token given, and this server asks for one: authorization: Bearer TOKEN"),
        (bearer("bad"), "this token is not in the server's list"),
    ],
)
async def test_no_token_and_an_unknown_one_are_told_apart(
    metadata: tuple[tuple[str, str], ...], reason: str, tmp_path: Path
) -> None:
    file = credentials_file(tmp_path / "c", entry("good", "generate"))
    async with serving(file) as address, grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(METHODS["unary_unary"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"this", metadata=metadata, timeout=10)
    assert (caught.value.code(), caught.value.details()) == (UNAUTHENTICATED, reason)


async def test_the_caller_of_one_call_is_not_that_of_the_next(tmp_path: Path) -> None:
    entries = [entry(name, "generate", tenant=name) for name in ("one", "two")]
    async with (
        serving(credentials_file(tmp_path / "c", *entries)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        streams = []
        for name in ("one", "two"):
            call = channel.stream_stream(METHODS["stream_stream"])(metadata=bearer(name))
            await call.write(b"first")
            streams.append((name, call))
        for name, call in streams:
            assert await call.read() == f"first of {name}".encode()
            await call.write(b"second")
        for name, call in streams:
            assert await call.read() == f"second of {name}".encode()
            call.cancel()


async def test_what_does_not_exist_is_told_to_those_alone_who_are_known(tmp_path: Path) -> None:
    async with (
        serving(credentials_file(tmp_path / "c", entry("good", "generate"))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for method in (f"/{SERVICE}/Nothing", "/no.Service/At"):
            assert await answer(channel, "unary_unary", method=method) is UNAUTHENTICATED
            assert await answer(channel, "unary_unary", *bearer("good"), method=method) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_without_a_rule_is_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PERMISSIONS, METHODS["unary_unary"])
    everything = entry("good", *(role.value for role in Role))
    async with (
        serving(credentials_file(tmp_path / "c", everything)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await answer(channel, "unary_unary", *bearer("good")) is PERMISSION_DENIED


async def test_tokens_change_while_a_stream_goes_on(tmp_path: Path) -> None:
    file = credentials_file(tmp_path / "c", entry("old", "generate", tenant="acme"))
    async with serving(file) as address, grpc.aio.insecure_channel(address) as channel:
        running = channel.stream_stream(METHODS["stream_stream"])(metadata=bearer("old"))
        await running.write(b"first")
        assert await running.read() == b"first of acme"
        credentials_file(file, entry("new", "generate", tenant="acme"))
        assert await answer(channel, "unary_unary", *bearer("old")) is UNAUTHENTICATED
        assert await answer(channel, "unary_unary", *bearer("new")) == b"this of acme"
        replaced(file, b"[{]")
        assert await answer(channel, "unary_unary", *bearer("new")) == b"this of acme"
        await running.write(b"second")
        assert await running.read() == b"second of acme"
        running.cancel()


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Callable[..., grpc.aio.Channel]]:
    """Channels to a server that knows one token, and the certificate of "edge"; with a certificate for a name."""
    authority = Authority("ca")
    cert, key = authority.issue("server").write(tmp_path, "server")
    ca = replaced(tmp_path / "ca", authority.pem)
    by_certificate = {"certificate": "edge", "tenant": "acme", "roles": ["generate"]}
    file = credentials_file(tmp_path / "c", by_certificate, entry("good", "generate", tenant="token's"))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(file, server_credentials(str(cert), str(key), str(ca))))

        def connect(name: str) -> grpc.aio.Channel:
            pair = authority.issue(name)
            credentials = grpc.ssl_channel_credentials(authority.pem, pair.key, pair.cert)
            channel = grpc.aio.secure_channel(address, credentials)
            stack.push_async_callback(channel.close)
            return channel

        yield connect


@pytest.mark.parametrize("kind", METHODS)
async def test_a_certificate_stands_for_a_caller_and_a_token_goes_before_it(
    kind: str, connect: Callable[..., grpc.aio.Channel]
) -> None:
    assert await answer(connect("edge"), kind) == b"this of acme"
    assert await answer(connect("stranger"), kind) is UNAUTHENTICATED
    assert await answer(connect("stranger"), kind, *bearer("good")) == b"this of token's"
    assert await answer(connect("edge"), kind, *bearer("bad")) is UNAUTHENTICATED


async def test_errors_of_a_servicer_reach_a_caller_with_a_certificate(
    connect: Callable[..., grpc.aio.Channel],
) -> None:
    call = connect("edge").stream_stream(METHODS["stream_stream"])()
    await call.write(b"wrong")
    assert await call.read() == b"wrong of acme"
    with pytest.raises(grpc.aio.AioRpcError, match="request must be right"):
        await call.read()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stub_whose_calls_carry_metadata_is_a_stub(tmp_path: Path) -> None:
    async with (
        serving(credentials_file(tmp_path / "c", entry("good", "generate"))) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = CallsWithMetadata(channel, bearer("good")).unary_unary(METHODS["unary_unary"])
        assert await call(b"this", timeout=10) == b"this of "
