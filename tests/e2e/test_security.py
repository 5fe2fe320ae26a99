"""Every service as a process with TLS and credentials: who gets in, what changes while streams run, what is logged.

The tests must run in this order: the last one reads the logs that the others have caused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import openai
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.core.params import Source
from outrider.security.permissions import PERMISSIONS
from outrider.security.tokens import CallsWithMetadata, bearer
from outrider.v1 import datastore_pb2, datastore_pb2_grpc
from outrider_cli.local.process import ManagedProcess
from outrider_client.blocking import BlockingClient
from outrider_client.errors import ResourceExhausted, Unauthenticated, Unavailable
from outrider_client.generation import Result
from tests.e2e.secured_stack import ENTRIES, NAMES, OUTSIDERS, REDIS_PASSWORD, TOKENS, SecuredStack, secured_stack
from tests.support.certificates import Authority, credentials_file, entry, replaced

pytestmark = pytest.mark.slow

PROMPT = "import unittest\n\nclass TestVelociraptor(unittest.TestCase):\n    def test_"
OTHERS = (Source.SHARED, Source.RING, Source.PRIOR)
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    folder: Path = tmp_path_factory.mktemp("secured")
    with secured_stack(folder) as running:
        yield running


def methods_of(channel: grpc.Channel) -> list[str]:
    """Every RPC of every service of a server, which reflection reveals to permitted callers."""
    allowed = cast(grpc.Channel, CallsWithMetadata(channel, bearer(TOKENS["service"])))
    stub = reflection_pb2_grpc.ServerReflectionStub(allowed)

    def ask(**fields: str) -> Any:
        [answer] = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**fields)]), timeout=10)
        return answer

    methods = []
    for service in ask(list_services="").list_services_response.service:
        described = ask(file_containing_symbol=service.name).file_descriptor_response
        for serialized in described.file_descriptor_proto:
            file = FileDescriptorProto.FromString(serialized)
            for each in file.service:
                if f"{file.package}.{each.name}" == service.name:
                    methods += [f"/{service.name}/{method.name}" for method in each.method]
    return methods


def status_of(channel: grpc.Channel, method: str, *tokens: str) -> grpc.StatusCode:
    """The status of a call with an empty message."""
    metadata = [pair for token in tokens for pair in bearer(token)]
    call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=10)
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    return cast(grpc.Call, error.value).code()


@pytest.mark.parametrize("name", NAMES)
def test_nobody_gets_in_who_is_not_known_or_has_nothing_to_ask_for(stack: SecuredStack, name: str) -> None:
    with stack.channel(name) as channel:
        methods = methods_of(channel)
        assert len(methods) >= 2 + 2 + 1  # its own, those of health, and reflection
        assert set(methods) <= set(PERMISSIONS)
        for method in (*methods, "/no.Service/Method"):
            assert status_of(channel, method) is grpc.StatusCode.UNAUTHENTICATED, method
            assert status_of(channel, method, "wrong") is grpc.StatusCode.UNAUTHENTICATED, method
            assert status_of(channel, method, TOKENS["service"], "wrong") is grpc.StatusCode.UNAUTHENTICATED, method
        for method in methods:
            assert status_of(channel, method, OUTSIDERS[name]) is grpc.StatusCode.PERMISSION_DENIED, method


@pytest.mark.parametrize("name", NAMES)
def test_no_handshake_succeeds_without_a_valid_certificate(stack: SecuredStack, name: str) -> None:
    roots = stack.ca.read_bytes()
    expired = stack.authority.issue("client", days=-1)
    stranger = Authority("ca").issue("client")
    channels = {
        "plaintext": grpc.insecure_channel(stack.address(name)),
        "no certificate": grpc.secure_channel(stack.address(name), grpc.ssl_channel_credentials(roots)),
        "expired": stack.channel(name, expired),
        "of another authority": stack.channel(name, stranger),
    }
    with stack.channel(name) as channel:
        methods = methods_of(channel)
    for what, channel in channels.items():
        for method in methods:
            code = status_of(channel, method, TOKENS["service"])
            assert code is grpc.StatusCode.UNAVAILABLE, (what, method, code)
        channel.close()


def test_health_alone_is_told_without_credentials(stack: SecuredStack) -> None:
    """`secured_stack` has waited with it. Here: it serves nothing else, and known callers can ask everywhere."""
    for name in NAMES:
        with stack.channel(name) as channel:
            allowed = cast(grpc.Channel, CallsWithMetadata(channel, bearer(TOKENS["service"])))
            response = health_pb2_grpc.HealthStub(allowed).Check(health_pb2.HealthCheckRequest(service=""), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        flags = stack.children[name]._arguments
        with grpc.insecure_channel(flags[flags.index("--health-listen") + 1]) as plain:
            for method in PERMISSIONS:
                if not method.startswith("/grpc.health.v1.Health/"):
                    assert status_of(plain, method, TOKENS["service"]) is grpc.StatusCode.UNIMPLEMENTED


def connected(stack: SecuredStack, token: str) -> BlockingClient:
    return BlockingClient(stack.address("verifier"), token=token, **stack.files())


def generate(client: BlockingClient, **options: Any) -> Result:
    given = {"method": "retrieval", "temperature": 0.7, "seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return client.complete(PROMPT, **given | options)  # type: ignore[arg-type]


def test_services_draft_and_retrieve_for_each_other(stack: SecuredStack) -> None:
    with connected(stack, TOKENS["acme"]) as client:
        plain = generate(client, method="off")
        for method in ("pearl", "double"):
            result = generate(client, method=method)
            assert result.token_ids == plain.token_ids
            assert result.summary.num_drafted_tokens > 0
            assert result.summary.num_speculator_losses == 0
        info = client.info()
        assert info.speculator.connected
        assert info.datastore.connected


def retrieved(result: Result) -> int:
    return sum(each.num_tokens for each in result.summary.accepted_by_source if Source(each.source) in OTHERS)


def num_ring_tokens(stack: SecuredStack, tenant: str) -> int:
    with stack.channel("datastore") as channel:
        allowed = cast(grpc.Channel, CallsWithMetadata(channel, bearer(TOKENS["service"])))
        stub = datastore_pb2_grpc.DatastoreServiceStub(allowed)
        rings = stub.GetInfo(datastore_pb2.DatastoreServiceGetInfoRequest(), timeout=10).rings
    return sum(ring.num_tokens for ring in rings if ring.tenant == tenant)


def test_a_tenant_never_retrieves_what_another_has_said(stack: SecuredStack) -> None:
    with connected(stack, TOKENS["acme"]) as acme, connected(stack, TOKENS["evil"]) as evil:
        first = generate(acme, retrieval_scope="tenant")
        deadline = time.monotonic() + 30
        # Recording comes after the answer, and copies after recording.
        while retrieved(again := generate(acme, retrieval_scope="tenant")) < NUM_TOKENS // 2:
            assert time.monotonic() < deadline
        assert again.token_ids == first.token_ids
        for scope in ("session", "tenant", "global"):
            result = generate(evil, retrieval_scope=scope)
            assert result.token_ids == first.token_ids
            assert retrieved(result) == 0
        assert num_ring_tokens(stack, "acme") > 0


def test_a_tenant_beyond_its_limit_is_told_when_to_come_back(stack: SecuredStack) -> None:
    with connected(stack, TOKENS["poor"]) as client:
        generate(client, max_tokens=1)
        with pytest.raises(ResourceExhausted, match="requests_per_minute of tenant 'poor'") as error:
            generate(client, max_tokens=1)
        assert error.value.retry_after_s is not None
        assert 0 < error.value.retry_after_s <= 60


def test_a_caller_of_the_gateway_is_who_its_token_says_and_the_gateway_s_own_is_never_lent(stack: SecuredStack) -> None:
    cert, key = map(str, stack.authority.issue("gateway").write(stack.folder, "gateway"))
    flags = [
        "--upstream",
        stack.address("verifier"),
        "--peer-ca",
        str(stack.ca),
        "--peer-cert",
        cert,
        "--peer-key",
        key,
    ]
    flags += ["--peer-token-file", str(stack.service_token), "--log-level", "debug"]
    gateway = ManagedProcess("gateway", "outrider_gateway", flags, stack.folder / "gateway.log", listen="127.0.0.1:0")
    try:
        gateway.start()

        def ask(key: str) -> str:
            url = f"http://{gateway.address}/v1"
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                told = client.completions.create(model="demo/target", prompt=PROMPT, max_tokens=8, temperature=0)
            return told.choices[0].text

        with connected(stack, TOKENS["acme"]) as client:
            assert ask(TOKENS["acme"]) == client.complete(PROMPT, max_tokens=8, temperature=0).text
        with pytest.raises(openai.AuthenticationError):
            ask("nobody")
        body = {"prompt": PROMPT, "max_tokens": 8}
        assert httpx.post(f"http://{gateway.address}/v1/completions", json=body).status_code == 401
        with pytest.raises(openai.PermissionDeniedError):
            ask(TOKENS["drafter"])
        with pytest.raises(openai.RateLimitError, match="requests_per_minute of tenant 'poor'"):
            ask(TOKENS["poor"])  # an earlier test has used its only request
    finally:
        gateway.stop()
    # Its log is read with all others.
    stack.children["gateway"] = gateway


def test_certificates_and_tokens_change_while_a_generation_runs(stack: SecuredStack) -> None:
    old_client = connected(stack, TOKENS["acme"])
    options: dict[str, Any] = {"max_tokens": 1200, "ignore_eos": True, "method": "double", "seed": 1}
    running = old_client.generate(PROMPT, **options)
    next(running)  # the verifier does not run far ahead of its reader
    old_pair = stack.authority.issue("client")
    old_roots = stack.ca.read_bytes()

    stack.authority = Authority("another ca")
    for name in NAMES:
        stack.authority.issue(name).write(stack.folder, name)
    replaced(stack.ca, stack.authority.pem)
    TOKENS.update(service="n3w-of-service", acme="n3w-of-acme")
    credentials_file(
        stack.credentials,
        entry(TOKENS["service"], "service"),
        entry(TOKENS["acme"], "generate", tenant="acme"),
        *ENTRIES[2:],
    )
    replaced(stack.service_token, TOKENS["service"].encode())

    with connected(stack, TOKENS["acme"]) as client:
        for method in ("pearl", "double"):
            result = generate(client, method=method)
            assert result.summary.num_drafted_tokens > 0
            assert result.summary.num_speculator_losses == 0
        info = client.info()
        assert info.speculator.connected
    with pytest.raises(Unauthenticated):
        old_client.info()
    for name in NAMES:
        credentials = grpc.ssl_channel_credentials(stack.ca.read_bytes(), old_pair.key, old_pair.cert)
        with grpc.secure_channel(stack.address(name), credentials) as channel:
            method = "/grpc.health.v1.Health/Check"
            assert status_of(channel, method, TOKENS["service"]) is grpc.StatusCode.UNAVAILABLE
    believing_the_old = replaced(stack.folder / "old-ca.pem", old_roots)
    files = stack.files() | {"ca_file": believing_the_old}
    client = BlockingClient(stack.address("verifier"), token=TOKENS["acme"], **files)
    with client, pytest.raises(Unavailable):
        client.info(timeout_s=5)
    for _ in running:
        pass
    assert running.result.num_output_tokens == 1200
    assert running.result.summary.num_speculator_losses == 0
    old_client.close()


def test_no_log_and_no_description_has_a_secret_or_a_prompt_in_it(stack: SecuredStack) -> None:
    with connected(stack, TOKENS["acme"]) as client:
        prompt = client.tokenize(PROMPT)
        shown = f"{stack.logs()}\n{client.info()}"
    with stack.channel("datastore") as channel:
        allowed = cast(grpc.Channel, CallsWithMetadata(channel, bearer(TOKENS["service"])))
        stub = datastore_pb2_grpc.DatastoreServiceStub(allowed)
        shown += str(stub.GetInfo(datastore_pb2.DatastoreServiceGetInfoRequest(), timeout=10))
    assert "session.started" in shown
    assert "caller.refused" in shown
    for secret in (
        REDIS_PASSWORD,
        "t0ken-of",
        "n3w-of",
        "PRIVATE KEY",
        "Velociraptor",
        ", ".join(map(str, prompt[:4])),
    ):
        assert secret not in shown, secret
