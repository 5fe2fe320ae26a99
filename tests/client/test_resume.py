"""A generation survives the call that it began in, and its text is the same as in a single call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_client import BlockingClient, Client
from outrider_client.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from tests.client.both_clients import complete
from tests.support.fake_verifier import (
    SEED,
    FakeVerifier,
    Script,
    a_good_generation,
    chunk,
    finished,
    running_fake,
    started,
    until_cancelled,
)

Code = grpc.StatusCode
NOBODY = "127.0.0.1:9"


def breaks_once(verifier: FakeVerifier, code: Code = Code.UNAVAILABLE) -> Script:
    """The first call breaks after a chunk; the second one sends the rest."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        if len(verifier.requests) == 1:
            yield chunk(5, 6, text="a b")
            context.abort(code, "broken")
        yield chunk(7, 8, text=" c d")
        yield finished()

    return script


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN])
async def test_a_broken_call_goes_on_in_another_with_the_seed_and_the_tokens_so_far(
    verifier: FakeVerifier, kind: str, code: Code
) -> None:
    verifier.script = breaks_once(verifier, code)
    result = await complete(verifier.address, kind, temperature=0.7, max_tokens=9, resume_token_ids=[3, 4])
    assert (result.text, result.token_ids, result.num_resumes, result.seed) == ("a b c d", (5, 6, 7, 8), 1, SEED)
    first, second = verifier.requests
    assert list(first.resume_token_ids) == [3, 4]
    assert list(second.resume_token_ids) == [3, 4, 5, 6]
    assert (second.sampling.seed, second.sampling.max_tokens) == (SEED, 9)
    assert second.prompt == first.prompt


async def test_ends_of_a_resumed_text_are_counted_in_the_whole_text(verifier: FakeVerifier) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        if len(verifier.requests) == 1:
            first = chunk(5, 6, text="a \U0001f600")
            first.chunk.text_ends.extend([2, 3])
            yield first
            context.abort(Code.UNAVAILABLE, "broken")
        later = chunk(7, 8, text=" c d")
        later.chunk.text_ends.extend([2, 4])
        yield later
        yield finished()

    verifier.script = script
    async with Client(verifier.address) as client, client.generate("hello", text_ends=True) as generation:
        ends = [each.text_ends async for each in generation]
    assert ends == [(2, 3), (5, 7)]
    assert len(generation.result.text) == 7


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_silent_server_is_given_up_after_the_stall_timeout(verifier: FakeVerifier, kind: str) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if len(verifier.requests) == 1:
            yield from until_cancelled(verifier)(request, context)
        else:
            yield started()
            yield chunk(7, 8, text=" c")
            yield finished()

    verifier.script = script
    result = await complete(verifier.address, kind, stall_timeout_s=0.2)
    assert (result.text, result.num_resumes) == ("a b c", 1)
    assert verifier.ended.is_set()  # the silent call was cancelled


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_slow_reader_is_no_silent_server(verifier: FakeVerifier, kind: str) -> None:
    if kind == "asyncio":
        async with Client(verifier.address) as client, client.generate("hello", stall_timeout_s=0.3) as generation:
            chunks = [await anext(generation)]
            await asyncio.sleep(0.5)  # longer than the timeout: nothing is waited for
            chunks += [piece async for piece in generation]
    else:
        with BlockingClient(verifier.address) as blocking, blocking.generate("hello", stall_timeout_s=0.3) as twin:
            chunks = [next(twin)]
            await asyncio.sleep(0.5)
            chunks += list(twin)
    assert [piece.text for piece in chunks] == ["a b c", " d"]
    assert len(verifier.requests) == 1


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
@pytest.mark.parametrize(
    ("code", "options"),
    [(Code.INVALID_ARGUMENT, {}), (Code.FAILED_PRECONDITION, {}), (Code.UNAVAILABLE, {"resume": False})],
)
async def test_what_would_fail_again_or_shall_not_be_resumed_is_not(
    verifier: FakeVerifier, kind: str, code: Code, options: dict[str, object]
) -> None:
    verifier.script = breaks_once(verifier, code)
    with pytest.raises(Exception, match="broken"):
        await complete(verifier.address, kind, **options)
    assert len(verifier.requests) == 1


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_the_deadline_holds_for_all_calls_together(verifier: FakeVerifier, kind: str) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        yield chunk(5, text="a")
        if context.time_remaining() < 0.3:
            verifier.ended.wait(10)
        context.abort(Code.UNAVAILABLE, "draining")

    verifier.script = script
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await complete(verifier.address, kind, timeout_s=0.6)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_all_calls_go_to_a_replica_that_answers(verifier: FakeVerifier, kind: str) -> None:
    addresses = f"{NOBODY},{verifier.address}"
    for _ in range(3):
        assert (await complete(addresses, kind)).text == "a b c d"
    if kind == "asyncio":
        async with Client([NOBODY, verifier.address]) as client:
            assert (await client.info()).model.model_id == "fake"
            assert await client.tokenize("ab") == [97, 98]
            assert await client.detokenize([97, 98]) == "ab"
            assert await client.health()
    else:
        with BlockingClient([NOBODY, verifier.address]) as blocking:
            assert blocking.info().model.model_id == "fake"
            assert blocking.tokenize("ab") == [97, 98]
            assert blocking.detokenize([97, 98]) == "ab"
            assert blocking.health()


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_one_replica_that_serves_is_health_enough(verifier: FakeVerifier, kind: str) -> None:
    async def is_healthy(*addresses: str) -> bool:
        if kind == "asyncio":
            async with Client(addresses) as client:
                return await client.health()

        def ask() -> bool:
            with BlockingClient(addresses) as blocking:
                return blocking.health()

        return await asyncio.to_thread(ask)

    with running_fake() as loading:
        loading.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await is_healthy(loading.address, NOBODY, verifier.address)
        assert not await is_healthy(loading.address)
        verifier.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not await is_healthy(loading.address, NOBODY, verifier.address)


async def test_nobody_there_is_said_within_a_few_seconds() -> None:
    async with Client(f"{NOBODY},127.0.0.1:10") as client:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(client.complete("hello"), 10)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(client.info(), 10)


async def test_cancelling_a_generation_that_is_being_resumed_ends_it(verifier: FakeVerifier) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if len(verifier.requests) > 1:
            context.abort(Code.UNAVAILABLE, "draining")
        yield started()
        yield chunk(5, text="a")
        context.abort(Code.UNAVAILABLE, "draining")

    verifier.script = script
    async with Client(verifier.address) as client:
        generation = client.generate("hello")
        await anext(generation)
        asyncio.get_running_loop().call_later(0.2, generation.cancel)
        with pytest.raises(Cancelled):
            await anext(generation)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_text_goes_on_with_the_model_that_began_it_or_not_at_all(verifier: FakeVerifier, kind: str) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        num_calls = len(verifier.requests)
        yield started("target", "float32" if num_calls == 1 or (num_calls == 4 and returns) else "bfloat16")
        yield chunk(num_calls, text=str(num_calls))
        if num_calls == 1:
            context.abort(Code.UNAVAILABLE, "gone")
        yield finished()

    verifier.script, returns = script, True
    result = await complete(verifier.address, kind)
    assert (result.text, result.num_resumes) == ("14", 1)
    assert [len(request.resume_token_ids) for request in verifier.requests] == [0, 1, 1, 1]
    verifier.requests.clear()
    returns = False
    with pytest.raises(Unavailable, match="serves target in bfloat16; the generation was begun by target in float32"):
        await complete(verifier.address, kind, resume_timeout_s=0.5)


async def test_a_lost_status_after_the_last_message_is_no_error(verifier: FakeVerifier) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield from a_good_generation(request, context)
        context.abort(Code.UNAVAILABLE, "gone")

    verifier.script = script
    async with Client(verifier.address) as client:
        assert (await client.complete("hello")).text == "a b c d"
    assert len(verifier.requests) == 1


async def test_a_message_that_cannot_be_read_breaks_the_call() -> None:
    async def garbage(request: GenerateRequest, context: object) -> AsyncIterator[bytes]:
        yield started().SerializeToString()
        yield b"\xff\xff\xff\xff"

    handler = grpc.unary_stream_rpc_method_handler(garbage, request_deserializer=GenerateRequest.FromString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("outrider.v1.VerifierService", {"Generate": handler}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with Client(address) as client:
        with pytest.raises(Internal, match="cannot be parsed"):
            await client.complete("hello")
    await server.stop(0)
