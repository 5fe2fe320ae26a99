"""Limits of what a verifier gives its callers: sessions, requests, tokens, prompts, drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.quotas import Quotas
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.handshake import handshake
from outrider_client.client import Client
from outrider_client.errors import InvalidArgument, OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated
from tests.support.certificates import credentials_file, entry
from tests.support.scripted_datastore import scripted_datastore
from tests.support.services import running_verifier, target_model

PROMPT = "def add(a, b):\n"


def gate(tmp_path: Path, *entries: dict[str, object]) -> Gate:
    file = credentials_file(tmp_path / "credentials", *entries)
    book = credential_book(str(file), has_client_certificates=False)
    return Gate(book, "outrider.v1.VerifierService")


async def test_a_tenant_has_its_sessions_whatever_the_others_do(tmp_path: Path) -> None:
    entries = [
        entry("acme-1", "generate", tenant="acme", num_sessions=1),
        entry("acme-2", "generate", tenant="acme"),
        entry("other", "generate", tenant="other"),
        entry("drafter", "draft"),
    ]
    async with running_verifier(interceptors=[gate(tmp_path, *entries)]) as verifier:
        one, two, other, drafter, nobody = (
            Client(verifier.address, token=token) for token in ("acme-1", "acme-2", "other", "drafter", "")
        )
        running = one.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        await anext(running)
        with pytest.raises(ResourceExhausted, match="num_sessions of tenant 'acme' is reached: 1") as error:
            await two.complete(PROMPT, max_tokens=1)
        assert error.value.retry_after_s == 1.0
        assert (await other.complete(PROMPT, max_tokens=4, ignore_eos=True)).num_output_tokens == 4
        await running.aclose()
        assert await verifier.is_idle()
        assert (await two.complete(PROMPT, max_tokens=4, ignore_eos=True)).num_output_tokens == 4
        with pytest.raises(PermissionDenied, match="not for the roles of the caller"):
            await drafter.complete(PROMPT)
        with pytest.raises(Unauthenticated):
            await nobody.complete(PROMPT)
        for client in (one, two, other, drafter, nobody):
            await client.close()


async def test_a_session_belongs_to_the_tenant_of_its_callers_credentials(tmp_path: Path) -> None:
    entries = [entry(name, "generate", tenant=name) for name in ("acme", "other")] + [entry("nobody's", "generate")]
    async with (
        scripted_datastore() as (datastore, peer),
        running_verifier(interceptors=[gate(tmp_path, *entries)], datastore=peer.state.address) as verifier,
    ):
        for token, tenant in (("acme", "acme"), ("other", "other"), ("nobody's", "")):
            datastore.lookups.clear()
            async with Client(verifier.address, token=token) as client:
                await client.complete(PROMPT, max_tokens=4, ignore_eos=True, method="retrieval")
            async with asyncio.timeout(10):
                while not datastore.lookups:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.005)
            assert {request.scope.tenant for request in datastore.lookups if request.HasField("scope")} == {tenant}


async def test_requests_and_tokens_are_counted_and_the_refusal_says_when_to_come_back(tmp_path: Path) -> None:
    now = 0.0
    entries = [
        entry("few", "generate", tenant="few", requests_per_minute=2),
        entry("short", "generate", tenant="short", tokens_per_minute=30),
    ]
    quotas = Quotas(clock=lambda: now)
    async with (
        running_verifier(interceptors=[gate(tmp_path, *entries)], quotas=quotas) as verifier,
        Client(verifier.address, token="few") as few,
        Client(verifier.address, token="short") as short,
    ):
        await few.complete(PROMPT, max_tokens=1)
        with pytest.raises(OutOfRange):
            await few.complete(PROMPT, max_tokens=10**6)  # also counts as a request
        with pytest.raises(ResourceExhausted, match="requests_per_minute of tenant 'few'") as error:
            await few.complete(PROMPT, max_tokens=1)
        assert error.value.retry_after_s == pytest.approx(30)
        assert (await short.complete(PROMPT, max_tokens=60, ignore_eos=True)).num_output_tokens == 60
        with pytest.raises(ResourceExhausted, match="tokens_per_minute of tenant 'short'") as error:
            await short.complete(PROMPT, max_tokens=1)
        assert error.value.retry_after_s == pytest.approx(62)
        now = 63.0
        await short.complete(PROMPT, max_tokens=1)
        await few.complete(PROMPT, max_tokens=1)


async def test_a_caller_without_credentials_has_no_more_than_its_sessions() -> None:
    async with running_verifier(quotas=Quotas(1)) as verifier, Client(verifier.address) as client:
        running = client.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        await anext(running)
        async with Client(verifier.address) as again:
            with pytest.raises(ResourceExhausted, match="max_sessions_per_caller is reached: 1"):
                await again.complete(PROMPT, max_tokens=1)
        await running.aclose()


async def test_a_prompt_may_be_as_long_as_the_server_says() -> None:
    async with running_verifier(max_prompt_tokens=4) as verifier, Client(verifier.address) as client:
        assert (await client.complete([1, 2, 3, 4], max_tokens=3, ignore_eos=True)).num_output_tokens == 3
        with pytest.raises(OutOfRange, match="prompt must come to at most 4 tokens, this server's limit, got 5"):
            await client.complete([1, 2, 3, 4, 5], max_tokens=3)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    with capture_logs() as captured:
        yield captured


async def test_a_flood_of_drafts_is_dropped_and_the_text_is_the_same(logs: list[EventDict]) -> None:
    async with running_verifier(max_draft_nodes_per_s=1000) as verifier:
        async with Client(verifier.address) as client:
            plain = await client.complete([5, 6, 7], seed=3, max_tokens=250, ignore_eos=True, method="off")
        async with grpc.aio.insecure_channel(verifier.address) as channel:
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Collaborate()
            request = verifier_pb2.GenerateRequest(
                prompt=verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=[5, 6, 7])),
                sampling=types_pb2.SamplingParams(seed=3, max_tokens=250, ignore_eos=True),
                speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_PEARL),
            )
            opening = verifier_pb2.CollaborateOpen(handshake=handshake(target_model()), request=request)
            await call.write(verifier_pb2.CollaborateRequest(open=opening))
            # A message that is written while a call ends spoils its status, so the flood ends long before the text.
            for number in range(20):
                await call.write(verifier_pb2.CollaborateRequest(draft=_wide_draft(1 + 500 * number)))
            token_ids: list[int] = []
            while isinstance(response := await call.read(), verifier_pb2.CollaborateResponse):
                token_ids.extend(response.chunk.token_ids)
            assert await call.code() is grpc.StatusCode.OK
        assert token_ids == list(plain.token_ids)
    [dropped] = [event for event in logs if event["event"] == "drafts.dropped"]
    assert dropped["max_nodes_per_s"] == 1000


def _wide_draft(first_node_id: int) -> types_pb2.Draft:
    """500 nodes, all of them after the prompt's last token."""
    return types_pb2.Draft(
        base_len=3,
        first_node_id=first_node_id,
        parent_offsets=[0] * 500,
        token_ids=range(500),
        source=types_pb2.SOURCE_DRAFT,
    )


async def test_each_of_several_texts_counts_as_a_session() -> None:
    async with running_verifier(quotas=Quotas(2)) as verifier, Client(verifier.address) as client:
        with pytest.raises(ResourceExhausted, match="max_sessions_per_caller is reached: 2"):
            await client.complete(PROMPT, n=3, max_tokens=4, resume=False)
        assert len((await client.complete(PROMPT, n=2, max_tokens=4)).choices) == 2
        assert await verifier.is_idle()


async def test_a_prompt_that_was_read_before_is_told_to_its_own_tenant_alone(tmp_path: Path) -> None:
    entries = [entry(name, "generate", tenant=name) for name in ("acme", "other")]
    prompt = [9, *range(600, 800)]
    async with running_verifier(interceptors=[gate(tmp_path, *entries)]) as verifier:
        cached = []
        for token in ("acme", "acme", "other", "other"):
            async with Client(verifier.address, token=token) as client:
                cached.append((await client.complete(prompt, max_tokens=1)).num_cached_prompt_tokens)
    # Three blocks of 64; the rest of the prompt does not fill a block.
    assert cached == [0, 192, 0, 192]


async def test_requests_that_generate_nothing_count_and_take_no_session(tmp_path: Path) -> None:
    entries = [entry("few", "generate", tenant="few", requests_per_minute=3, num_sessions=1)]
    quotas = Quotas(1, lambda: 0.0)
    async with (
        running_verifier(interceptors=[gate(tmp_path, *entries)], quotas=quotas) as verifier,
        Client(verifier.address, token="few") as client,
    ):
        running = client.generate(PROMPT, max_tokens=1000, ignore_eos=True)
        await anext(running)
        token_ids = await client.tokenize(PROMPT)
        assert await client.detokenize(token_ids) == PROMPT
        for refused in (client.tokenize(PROMPT), client.detokenize(token_ids), client.token_bytes(token_ids)):
            with pytest.raises(ResourceExhausted, match="requests_per_minute of tenant 'few' is reached: 3") as error:
                await refused
            assert error.value.retry_after_s == 20.0
        await running.aclose()


@pytest.mark.parametrize(("number", "is_taken"), [(256, True), (257, False)])
async def test_a_request_has_so_many_stop_tokens(number: int, is_taken: bool) -> None:
    async with running_verifier() as verifier, Client(verifier.address) as client:
        generating = client.complete(PROMPT, max_tokens=1, stop_token_ids=[number % 512 for number in range(number)])
        if is_taken:
            await generating
            return
        with pytest.raises(InvalidArgument, match="stop_token_ids must be at most 256 tokens, got 257"):
            await generating
