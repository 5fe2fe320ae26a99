"""Many clients cancel, time out, disconnect, stop early or finish at random, with all parameters mixed. Every text
that comes is right, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest

from outrider.v1 import speculator_pb2, speculator_pb2_grpc
from outrider_cli.local.stack import LocalStack
from outrider_cli.prompts import load_prompts
from outrider_client import Client, Result
from outrider_client.errors import Cancelled, DeadlineExceeded, ResourceExhausted
from tests.support.schemas import HAND_MADE
from tests.support.variants import VARIANTS, options_of
from tests.support.waiting import until

pytestmark = [pytest.mark.suite, pytest.mark.timeout(480)]

NUM_CLIENTS = 200
SECONDS = 20
SECONDS_IF_FULL = 300
WARM_SHARE = 0.3
"""Share of the time after which memory is watched."""
MAX_GROWN_MB = 256.0
"""Maximum growth of a service's memory from then on: caches fill for minutes, ever more slowly."""
PROMPTS = [prompt.text for prompt in load_prompts("demo")][:6]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "seed": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 3},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {30: 2.0}, "seed": 4},
]
REST: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"stop": ["\n\n", "):"], "logprobs": 2},
    {"stop": ["self"], "include_stop_str_in_output": True, "bad_words": ["return"]},
    {"min_tokens": 8, "stop_token_ids": [5, 6, 7, 8, 9, 10], "echo": True, "rounds": True},
    {"structured_outputs": {"json": HAND_MADE[1]}},
    {"structured_outputs": {"regex": "[a-z]{2,8}( [a-z]{2,8}){3}"}},
    {"n": 2, "ignore_eos": True},
    {"prompt_logprobs": 1, "truncate_prompt_tokens": 40},
]
Request = tuple[int, int, int]
"""Numbers of a prompt, of sampling parameters, and of other parameters."""


def options(request: Request, method: str) -> dict[str, Any]:
    _, sampling, rest = request
    return {"max_tokens": 40, **SAMPLING[sampling], **REST[rest], **options_of(method)}


def said(result: Result) -> list[tuple[Any, ...]]:
    choices = result.choices or (result,)
    return [(each.token_ids, each.text, each.finish_reason, each.stop_string) for each in choices]


async def behave(client: Client, request: Request, method: str, expected: Result, chance: random.Random) -> str:
    """Makes one request and ends it in one of five ways; returns which. Raises AssertionError for a wrong text."""
    prompt, given = PROMPTS[request[0]], options(request, method)
    way = chance.choice(("finish", "finish", "finish", "stop early", "cancel", "time out", "drop"))
    if way == "finish":
        assert said(await client.complete(prompt, **given)) == said(expected), (request, method)
        return way
    if way == "time out":
        given["timeout_s"] = chance.uniform(0.001, 0.3)
    generation = client.generate(prompt, **given)
    texts = [each.text for each in expected.choices or (expected,)]
    seen: Counter[int] = Counter()
    try:
        async for chunk in generation:
            begin = seen[chunk.index]
            seen[chunk.index] += len(chunk.text)
            assert texts[chunk.index][begin : begin + len(chunk.text)] == chunk.text, (request, method)
            if chance.random() < 0.3:
                if way == "stop early":
                    await generation.aclose()
                    return way
                if way == "cancel":
                    generation.cancel()
                if way == "drop":
                    return way  # the last reference goes with it
    except (Cancelled, DeadlineExceeded):
        return way
    return way


async def test_whatever_clients_do_no_text_is_wrong_and_nothing_is_left(
    client: Client, stack: LocalStack, full: bool
) -> None:
    requests = [
        (prompt, sampling, rest)
        for prompt in range(len(PROMPTS) if full else 2)
        for sampling in range(len(SAMPLING))
        for rest in range(len(REST))
    ]
    expected = {request: await client.complete(PROMPTS[request[0]], **options(request, "off")) for request in requests}
    seconds = SECONDS_IF_FULL if full else SECONDS
    began, ways, refused = time.monotonic(), Counter[str](), Counter[str]()
    until = began + seconds
    warm_mb: dict[str, float] = {}

    async def live(number: int) -> None:
        chance = random.Random(number)
        async with Client(stack.address) as own:
            while time.monotonic() < until:
                if not warm_mb and time.monotonic() > began + seconds * WARM_SHARE:
                    warm_mb.update(resident_mb(stack))
                request, method = chance.choice(requests), chance.choice(VARIANTS)
                try:
                    ways[await behave(own, request, method, expected[request], chance)] += 1
                except ResourceExhausted as error:
                    refused[error.message] += 1
                    await asyncio.sleep(chance.uniform(0.05, 0.5))  # as a client does that is told to come back

    await asyncio.gather(*(live(number) for number in range(NUM_CLIENTS)))
    grown_mb = {name: end - warm_mb[name] for name, end in resident_mb(stack).items()}
    print(f"{NUM_CLIENTS} clients: {dict(ways)}; refused: {dict(refused)}; MB when warm: {warm_mb}, then: {grown_mb}")
    assert set(ways) == {"finish", "stop early", "cancel", "time out", "drop"}
    assert max(grown_mb.values()) < MAX_GROWN_MB
    await nothing_is_left(client, stack)
    for request in requests[:: len(requests) // 8]:
        assert said(await client.complete(PROMPTS[request[0]], **options(request, "pearl"))) == said(expected[request])


def resident_mb(stack: LocalStack) -> dict[str, float]:
    """Returns the memory that each service uses, by its name."""
    services = {"verifier": stack.verifiers[0], "speculator": stack.speculators[0], "datastore": stack.datastore}
    return {
        name: psutil.Process(service.pid).memory_info().rss / 1e6
        for name, service in services.items()
        if service is not None
    }


async def nothing_is_left(client: Client, stack: LocalStack) -> None:
    """Returns when neither service has a session, and no session holds any of the verifier's pool."""
    assert stack.speculator is not None
    async with grpc.aio.insecure_channel(stack.speculator.address) as channel:
        stub = speculator_pb2_grpc.SpeculatorServiceStub(channel)

        async def is_idle() -> bool:
            info = await client.info()
            drafting = await stub.GetInfo(speculator_pb2.SpeculatorServiceGetInfoRequest())
            return not (info.num_sessions or info.num_queued or info.kv_pool.num_held_tokens or drafting.num_sessions)

        await until(is_idle)
