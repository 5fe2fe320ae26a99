"""The asyncio client: its requests, its results, and its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from outrider.core.methods import METHODS
from outrider.core.methods.saguaro import FanOut
from outrider.core.params import AcceptanceRule, RetrievalScope, Rows, Source
from outrider.core.speculation import Method
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider.wire.speculation import METHODS_FROM_PROTO
from outrider_client import ChatMessage, Client, FinishReason
from outrider_client.enums import method_name
from outrider_client.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from tests.support.fake_verifier import SEED, FakeVerifier, chunk, finished, started, until_cancelled


@pytest.fixture
async def client(verifier: FakeVerifier) -> AsyncIterator[Client]:
    async with Client(verifier.address) as connected:
        yield connected


async def test_what_is_unset_stays_unset_on_the_wire(verifier: FakeVerifier, client: Client) -> None:
    await client.complete("hello", temperature=None)
    assert verifier.requests == [GenerateRequest(prompt=verifier_pb2.Prompt(text="hello"))]


async def test_zero_and_false_are_not_unset(verifier: FakeVerifier, client: Client) -> None:
    await client.complete("hello", temperature=0, seed=0, ignore_eos=False, retrieval=False, top_k=0)
    request = verifier.requests[0]
    assert all(request.sampling.HasField(name) for name in ("temperature", "seed", "ignore_eos", "top_k"))
    assert request.speculation.HasField("retrieval")
    assert not request.sampling.HasField("top_p")


async def test_every_option_arrives_in_its_field(verifier: FakeVerifier, client: Client) -> None:
    sampling = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": SEED, "max_tokens": 7,
        "stop_token_ids": [1, 2], "ignore_eos": True, "repetition_penalty": 1.5, "presence_penalty": -1.0,
        "frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "min_tokens": 3, "bad_words": ["no"], "stop": ["end"],
        "include_stop_str_in_output": True,
    }  # fmt: skip
    report = {"logprobs": 0, "prompt_logprobs": 2, "echo": False, "rounds": True, "trees": True, "text_ends": True}
    speculation = {"num_speculative_tokens": 4, "lookahead": 9, "min_path_probability": 0.2, "retrieval": True}
    other: dict[str, Any] = {
        "resume_token_ids": [3, 4],
        "truncate_prompt_tokens": 9,
        "clamp_max_tokens": True,
        "prediction": "old",
    }
    named = {"method": "pearl", "logprobs_mode": "raw-logits", "bad_words_token_ids": [[1, 2]]}
    await client.complete([1, 2], **named, **sampling, **speculation, **report, **other)  # type: ignore[arg-type]
    sampling["bad_words_token_ids"] = [types_pb2.TokenIds(token_ids=[1, 2])]
    assert verifier.requests[0] == GenerateRequest(
        prompt=verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=[1, 2])),
        sampling=types_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_PEARL, **speculation),  # type: ignore[arg-type]
        report=verifier_pb2.ReportParams(logprobs_mode=verifier_pb2.LOGPROBS_MODE_RAW_LOGITS, **report),  # type: ignore[arg-type]
        **other,
    )
    await client.complete([1, 2], stop="one")
    assert list(verifier.requests[1].sampling.stop) == ["one"]


@pytest.mark.parametrize("method", METHODS.values())
async def test_a_method_may_be_named_as_people_write_it(verifier: FakeVerifier, client: Client, method: Method) -> None:
    await client.complete("hello", method=method.name)
    [number] = [request.speculation.method for request in verifier.requests]
    assert METHODS_FROM_PROTO[number] is method
    assert method_name(number) == method.name


async def test_how_rows_are_spent_and_what_is_kept_may_be_said(verifier: FakeVerifier, client: Client) -> None:
    await client.complete("hello", rows="tree", max_rows=4, acceptance_rule="match", shared_noise=False)
    await client.complete("hello", rows=Rows.CHAIN, acceptance_rule=AcceptanceRule.RATIO, allow_fallback=True)
    assert [request.speculation for request in verifier.requests] == [
        types_pb2.SpeculationParams(
            rows=types_pb2.ROWS_TREE,
            max_rows=4,
            acceptance_rule=types_pb2.ACCEPTANCE_RULE_MATCH,
            shared_noise=False,
        ),
        types_pb2.SpeculationParams(
            rows=types_pb2.ROWS_CHAIN, acceptance_rule=types_pb2.ACCEPTANCE_RULE_RATIO, allow_fallback=True
        ),
    ]


async def test_sources_arrive_in_their_order_by_name_member_or_number(verifier: FakeVerifier, client: Client) -> None:
    sources = ["pool", Source.RECYCLED, 3]
    await client.complete("hello", method="retrieval", sources=sources, retrieval_scope="tenant", retrieval_remote=True)
    assert verifier.requests[0].speculation.retrieval_params == types_pb2.RetrievalParams(
        scope=types_pb2.RETRIEVAL_SCOPE_TENANT,
        sources=[types_pb2.SOURCE_POOL, types_pb2.SOURCE_RECYCLED, types_pb2.SOURCE_PRIOR],
        remote=True,
    )


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ("pool", TypeError, "sources must be a list, got 'pool'"),
        (3, TypeError, "sources must be a list, got 3"),
        (["pools"], ValueError, "sources must be one of target, draft, prior, .*recycled, pool, .*, got 'pools'"),
    ],
)
async def test_wrong_sources_are_refused_before_anything_is_sent(
    verifier: FakeVerifier, client: Client, sources: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await client.complete("hello", method="retrieval", sources=sources)
    assert not verifier.requests


async def test_a_method_s_own_parameters_arrive_in_its_message(verifier: FakeVerifier, client: Client) -> None:
    await client.complete("hello", saguaro={"fan_out": FanOut.UNIFORM, "fallback": "plain", "budget": 4})
    await client.complete("hello", double={"tiers": [Source.PRIOR, "dynamic"], "serial": True})
    await client.complete("hello", method="best-first", best_first={})
    sent = [request.speculation for request in verifier.requests]
    fan_out, fallback = types_pb2.FAN_OUT_UNIFORM, types_pb2.FALLBACK_PLAIN
    assert sent[0].saguaro == types_pb2.SaguaroParams(fan_out=fan_out, fallback=fallback, budget=4)
    tiers = [types_pb2.SOURCE_PRIOR, types_pb2.SOURCE_DYNAMIC]
    assert sent[1].double == types_pb2.DoubleParams(tiers=tiers, serial=True)
    assert sent[2].WhichOneof("method_params") == "best_first"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"card": {"width": 5}}, TypeError, "card must have parameters of beam_width, .* only, got 'width'"),
        ({"card": {"beam_width": "5"}}, TypeError, "card.beam_width: "),
        ({"card": {"beam_width": 2**40}}, ValueError, "card.beam_width: "),
        ({"saguaro": {"fan_out": "wide"}}, ValueError, "saguaro.fan_out must be one of geometric, .* got 'wide'"),
        ({"double": {"tiers": "prior"}}, TypeError, "double.tiers must be a list, got 'prior'"),
        ({"card": {}, "double": {}}, TypeError, "parameters of more than one method: card, double"),
    ],
)
async def test_a_parameter_that_a_method_does_not_have_is_refused_at_once(
    client: Client, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.generate("hello", **options)


@pytest.mark.parametrize("scope", [RetrievalScope.TENANT, "tenant", "TENANT"])
async def test_with_whom_retrieval_shares_arrives_in_its_message(
    verifier: FakeVerifier, client: Client, scope: RetrievalScope | str
) -> None:
    await client.complete("hello", retrieval_scope=scope, contribute=False)
    params = verifier.requests[0].speculation.retrieval_params
    assert params == types_pb2.RetrievalParams(scope=types_pb2.RETRIEVAL_SCOPE_TENANT, contribute=False)
    with pytest.raises(ValueError, match="retrieval_scope must be one of session, tenant, global, got 'all'"):
        await client.complete("hello", retrieval_scope="all")


async def test_a_chat_may_be_messages_or_dicts(verifier: FakeVerifier, client: Client) -> None:
    await client.complete([ChatMessage(role="user", content="hi")])
    await client.complete([{"role": "user", "content": "hi"}])
    assert verifier.requests[0] == verifier.requests[1]
    assert verifier.requests[0].prompt.chat.messages[0].content == "hi"


async def test_what_cannot_be_sent_is_refused_at_once(client: Client) -> None:
    with pytest.raises(TypeError, match=r"argument 'temprature': did you mean 'temperature'\?"):
        client.generate("hello", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="prompt must be"):
        client.generate([1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"method must be one of off, speculative, .*, sequoia.*, got 'fast'"):
        client.generate("hello", method="fast")
    with pytest.raises(ValueError, match="rows must be one of chain, tree, got 'unspecified'"):
        client.generate("hello", rows="unspecified")


async def test_chunks_carry_tokens_sources_and_text(client: Client) -> None:
    async with client.generate("hello") as generation:
        chunks = [piece async for piece in generation]
    assert [piece.token_ids for piece in chunks] == [(5, 6, 7), (8,)]
    assert chunks[0].sources == (Source.DRAFT, Source.DRAFT, Source.TARGET)
    assert chunks[0].num_drafted == 8


async def test_the_result_has_everything_the_server_said(client: Client) -> None:
    result = await client.complete("hello")
    assert result.text == "a b c d"
    assert result.token_ids == (5, 6, 7, 8)
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_token_id == 0
    assert result.seed == SEED
    assert result.num_prompt_tokens == 3
    assert result.acceptance_length == 2
    assert result.acceptance_rate == 1 / 8
    assert result.bytes_per_accepted_token == 70


async def test_there_is_no_result_before_the_end(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = until_cancelled(verifier)
    async with client.generate("hello") as generation:
        await anext(generation)
        with pytest.raises(RuntimeError, match="not finished"):
            _ = generation.result


async def test_leaving_the_block_cancels_the_call(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = until_cancelled(verifier)
    async with client.generate("hello") as generation:
        await anext(generation)
        assert not verifier.ended.is_set()
    assert await asyncio.to_thread(verifier.ended.wait, 10)


async def test_cancel_ends_a_pending_read_and_keeps_what_came(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = until_cancelled(verifier)
    generation = client.generate("hello")
    await anext(generation)
    asyncio.get_running_loop().call_soon(generation.cancel)
    with pytest.raises(Cancelled):
        await anext(generation)
    assert generation.token_ids == (5, 6)
    assert await asyncio.to_thread(verifier.ended.wait, 10)


async def test_cancelling_the_task_cancels_the_call(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = until_cancelled(verifier)
    generation = client.generate("hello")
    await anext(generation)
    task = asyncio.ensure_future(anext(generation))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(verifier.ended.wait, 10)


async def test_unavailable_before_the_first_message_is_tried_again(verifier: FakeVerifier, client: Client) -> None:
    def loading_at_first(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if len(verifier.requests) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        yield started()
        yield chunk(5, text="a")
        yield finished(1)

    verifier.script = loading_at_first
    assert (await client.complete("hello")).text == "a"
    assert len(verifier.requests) == 3


async def test_a_broken_stream_that_is_not_to_be_resumed_can_be_resumed_by_hand(
    verifier: FakeVerifier, client: Client
) -> None:
    def breaks(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        yield chunk(5, 6, text="a b")
        context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    verifier.script = breaks
    generation = client.generate("hello", resume=False)
    with pytest.raises(Unavailable, match="draining"):
        _ = [piece async for piece in generation]
    assert len(verifier.requests) == 1
    assert (generation.seed, generation.token_ids) == (SEED, (5, 6))


async def test_a_stream_without_an_end_is_an_error(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = lambda request, context: iter([started(), chunk(5)])
    with pytest.raises(Internal, match="without finishing"):
        await client.complete("hello")


async def test_an_event_of_a_newer_server_is_ignored(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = lambda request, context: iter([started(), GenerateResponse(), chunk(5, source=99), finished(1)])
    assert (await client.complete("hello")).token_ids == (5,)


async def test_the_deadline_ends_a_silent_stream(verifier: FakeVerifier, client: Client) -> None:
    verifier.script = until_cancelled(verifier)
    with pytest.raises(DeadlineExceeded):
        await client.complete("hello", timeout_s=0.2)


async def test_a_generation_says_when_it_is_admitted_and_loses_nothing_by_it(
    verifier: FakeVerifier, client: Client
) -> None:
    expected = [piece async for piece in client.generate("hello")]
    generation = client.generate("hello")
    assert generation.session_id is None
    await generation.started()
    assert (generation.session_id, generation.seed, generation.num_prompt_tokens) == ("s-1", SEED, 3)
    await generation.started()
    assert [piece async for piece in generation] == expected
    assert generation.results == (generation.result,)


async def test_what_comes_before_the_first_text_is_admitted_is_kept(verifier: FakeVerifier, client: Client) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        for index in (1, 0):
            for event in (started(), chunk(5 + index, text="a"), finished(1)):
                event.index = index
                yield event

    verifier.script = script
    generation = client.generate("hello", n=2)
    await generation.started()
    assert generation.results[0] is None
    assert generation.results[1] is not None
    assert [piece.token_ids async for piece in generation] == [(6,), (5,)]
    assert generation.num_output_tokens == 2


async def test_a_refusal_is_told_by_waiting_for_the_admission(verifier: FakeVerifier, client: Client) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        context.abort(grpc.StatusCode.INTERNAL, "no")
        yield

    verifier.script = script
    with pytest.raises(Internal, match="no"):
        await client.generate("hello", resume=False).started()
