"""Through the edge, an application gets the cloud's own text, in fewer rounds."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from outrider.core.methods import METHODS
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_cli.links.direction import LinkSettings
from outrider_client.client import Client
from outrider_client.errors import Unavailable, Unimplemented, from_rpc_error
from outrider_client.generation import Result
from outrider_client.requests import Prompt
from tests.support.services import RunningEdge, RunningVerifier, draft_model, running_edge

TEXT = "class TestParser(unittest.TestCase):\n    def test_"
NUM_TOKENS = 48


async def generate(client: Client, method: str | None, prompt: Prompt = TEXT, temperature: float = 0.7) -> Result:
    return await client.complete(
        prompt, temperature=temperature, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, method=method
    )


async def test_drafts_are_accepted_and_save_rounds(
    client: Client, cloud: Client, verifier: RunningVerifier, edge: RunningEdge
) -> None:
    plain = await generate(cloud, "off")
    drafted = await generate(client, "speculative")
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert drafted.summary.num_accepted_tokens > 0
    assert drafted.summary.num_rounds < 0.8 * plain.summary.num_rounds
    assert drafted.summary.times_p50.draft_forward_ms > 0
    assert not drafted.summary.degraded
    assert await verifier.is_idle()
    assert await edge.is_idle()


async def test_any_form_of_prompt_gives_the_text_that_the_cloud_gives(client: Client, cloud: Client) -> None:
    prompts: list[Prompt] = [TEXT, await cloud.tokenize(TEXT), [{"role": "user", "content": "Sort a list"}]]
    for prompt in prompts:
        plain, drafted = await generate(cloud, "off", prompt), await generate(client, "speculative", prompt)
        assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
        assert drafted.num_prompt_tokens == plain.num_prompt_tokens
        assert drafted.summary.num_accepted_tokens > 0


@pytest.mark.parametrize("acceptance_rule", ["match", "ratio"])
async def test_token_ids_are_drafted_for_under_both_rules_at_temperature_0(
    client: Client, cloud: Client, acceptance_rule: str
) -> None:
    prompt = await cloud.tokenize(TEXT)
    plain = await generate(cloud, "off", prompt, temperature=0)
    drafted = await client.complete(
        prompt,
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        method="speculative",
        acceptance_rule=acceptance_rule,
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.summary.num_accepted_tokens > 0
    assert not drafted.summary.degraded


async def test_the_ratio_rule_judges_drafts_of_the_edge(client: Client) -> None:
    options = {"seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True, "acceptance_rule": "ratio"}
    drafted = await client.complete(TEXT, method="speculative", **options)  # type: ignore[arg-type]
    assert drafted.summary.num_accepted_tokens > 0
    assert not drafted.summary.degraded


async def test_what_a_round_verified_and_what_is_predicted_go_through_the_edge(client: Client, cloud: Client) -> None:
    plain = await generate(cloud, "off")
    options = {"seed": 11, "temperature": 0.7, "max_tokens": NUM_TOKENS, "ignore_eos": True, "clamp_max_tokens": True}
    given = {
        **options,
        "method": "pearl",
        "retrieval": True,
        "prediction": plain.text,
        "trees": True,
        "text_ends": True,
    }
    async with client.generate(TEXT, **given) as generation:  # type: ignore[arg-type]
        chunks = [each async for each in generation]
    assert generation.result.token_ids == plain.token_ids
    trees = [each.round.tree for each in chunks if each.round is not None]
    assert types_pb2.SOURCE_PREDICTION in {each for tree in trees for each in tree.sources}
    assert [end for each in chunks for end in each.text_ends][-1] == len(plain.text)
    clamped = await client.complete(TEXT, **{**options, "max_tokens": 10**6, "stop": [plain.text[8:20]]})  # type: ignore[arg-type]
    assert clamped.text == plain.text[:8]
    assert b"".join(await client.token_bytes(plain.token_ids)).decode() == plain.text


async def test_the_default_method_is_the_clouds(client: Client, cloud: Client) -> None:
    info = await client.info()
    assert info.default_method == types_pb2.METHOD_OFF
    assert (await generate(client, None)).summary.method == types_pb2.METHOD_OFF


async def test_auto_chooses_in_the_cloud_and_is_drafted_for_here(client: Client, cloud: Client) -> None:
    plain = await generate(cloud, "off")
    num_accepted = 0
    for _ in range(5):  # on a busy machine it may choose to run without drafts
        drafted = await generate(client, "auto")
        assert drafted.token_ids == plain.token_ids
        assert drafted.summary.method == types_pb2.METHOD_AUTO
        assert len(drafted.summary.decisions) > 0
        assert not drafted.summary.degraded
        num_accepted += drafted.summary.num_accepted_tokens
    assert num_accepted > 0


async def test_a_method_without_a_draft_model_goes_up_as_it_is(client: Client, cloud: Client) -> None:
    plain, retrieved = await generate(cloud, "off"), await generate(client, "retrieval")
    assert retrieved.token_ids == plain.token_ids
    assert retrieved.summary.method == types_pb2.METHOD_RETRIEVAL
    assert types_pb2.SOURCE_DRAFT not in {count.source for count in retrieved.summary.accepted_by_source}


async def test_without_a_seed_each_generation_draws_its_own_and_says_it(client: Client, cloud: Client) -> None:
    drawn = [await client.complete(TEXT, max_tokens=24, ignore_eos=True, method="pearl") for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    again = await cloud.complete(TEXT, max_tokens=24, ignore_eos=True, method="off", seed=drawn[0].seed)
    assert again.token_ids == drawn[0].token_ids


async def test_an_application_resumes_through_the_edge(client: Client, cloud: Client) -> None:
    plain = await generate(cloud, "off")
    rest = await client.complete(
        TEXT,
        temperature=0.7,
        seed=11,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        method="speculative",
        resume_token_ids=plain.token_ids[:20],
    )
    assert rest.token_ids == plain.token_ids[20:]
    assert rest.num_output_tokens == NUM_TOKENS
    assert rest.summary.num_accepted_tokens > 0


async def test_the_round_trip_is_measured_from_the_clouds_side(verifier: RunningVerifier, cloud: Client) -> None:
    plain = await generate(cloud, "off")
    async with (
        DelayProxy(verifier.address, LinkSettings(delay_ms=20.0)) as proxy,
        running_edge(proxy.address, model=draft_model()) as far,
        Client(far.address) as client,
    ):
        drafted = await generate(client, "speculative")
    assert drafted.token_ids == plain.token_ids
    times = drafted.summary.times_p50
    assert times.draft_latency_ms - times.draft_forward_ms > 40
    assert times.wait_ms > 40
    assert drafted.summary.num_empty_rounds < drafted.summary.num_rounds / 2


async def test_the_edge_answers_for_the_cloud(client: Client, cloud: Client) -> None:
    token_ids = await client.tokenize(TEXT)
    assert token_ids == await cloud.tokenize(TEXT)
    assert await client.detokenize(token_ids) == TEXT
    here, there = await client.info(), await cloud.info()
    assert here.model == there.model
    assert (here.speculator.address, here.speculator.connected) == ("edge", True)
    drafted = {number for number in here.methods if number not in there.methods}
    assert len(drafted) == len([method for method in METHODS.values() if method.needs_draft_model])


async def test_nobody_collaborates_with_an_edge(edge: RunningEdge) -> None:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Collaborate(iter([verifier_pb2.CollaborateRequest()]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(from_rpc_error(caught.value), Unimplemented)


async def test_an_edge_that_drains_refuses_what_is_new(client: Client, edge: RunningEdge) -> None:
    generation = client.generate(TEXT, max_tokens=NUM_TOKENS, ignore_eos=True, method="pearl")
    await anext(generation)
    edge.service.drain()
    with pytest.raises(Unavailable, match="the edge is draining"):
        await client.info()
    async for _ in generation:
        pass
    assert generation.result.num_output_tokens == NUM_TOKENS


async def test_a_request_with_everything_has_the_text_of_the_cloud(client: Client, cloud: Client) -> None:
    given: dict[str, Any] = {
        "seed": 3,
        "max_tokens": 48,
        "method": "pearl",
        "repetition_penalty": 1.2,
        "bad_words": ["self"],
        "min_tokens": 6,
        "logit_bias": {20: 2.0},
        "stop": ["\n\n"],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
    }
    several: dict[str, Any] = {"n": 2, "method": "retrieval"}
    for more in ({}, {"structured_outputs": {"regex": "[a-z]{2,6}( [a-z]{2,6}){3}"}}, several):
        options: dict[str, Any] = given | more
        here = await client.complete("import os\n", **options)
        there = await cloud.complete("import os\n", **(options | {"method": "off"}))
        for field in ("text", "token_ids", "finish_reason", "stop_string", "prompt_token_ids", "prompt_text"):
            assert getattr(here, field) == getattr(there, field), field
        assert [each.rank for each in here.logprobs] == [each.rank for each in there.logprobs]
        assert len(here.prompt_logprobs) == len(here.prompt_token_ids) - 1
        assert [each.text for each in here.choices] == [each.text for each in there.choices]
