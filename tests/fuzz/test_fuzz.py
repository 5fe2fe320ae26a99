"""No mutated message does harm: a few hundred for each RPC. `python -m tests.fuzz` sends any number of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from random import Random

import pytest
from google.protobuf.message import DecodeError

from outrider.v1 import types_pb2, verifier_pb2
from outrider_cli.local.stack import LocalStack
from tests.fuzz.calls import make_call
from tests.fuzz.examples import rpcs
from tests.fuzz.gateway import FuzzedGateway, running_gateway
from tests.fuzz.http_requests import make_call as make_http_call
from tests.fuzz.http_requests import paths
from tests.fuzz.mutations import mutated
from tests.fuzz.run import fuzz, fuzz_gateway
from tests.fuzz.servers import Servers, stack_config

pytestmark = pytest.mark.slow

NUM_MESSAGES = 200
NUM_REQUESTS = 100
PATHS = paths()
KNOWN = rpcs(types_pb2.ModelInfo(tokenizer_hash="any", vocab_size=2048))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(stack_config(tmp_path_factory.mktemp("logs"))) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedGateway]:
    with running_gateway(stack, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture
async def servers(stack: LocalStack) -> AsyncIterator[Servers]:
    async with Servers(stack) as connected:
        yield connected


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.suite
async def test_no_mutated_message_does_harm(servers: Servers, name: str) -> None:
    known = rpcs(servers.model)
    if needed := known[name].needs:
        # Earlier tests may have run on another worker, with its own services.
        await fuzz(servers, known[needed], NUM_MESSAGES, seed=0)
    result = await fuzz(servers, known[name], NUM_MESSAGES, seed=0)
    assert not result.findings, "\n\n".join(result.findings)
    assert result.num_messages >= NUM_MESSAGES
    assert "INVALID_ARGUMENT" in result.codes
    assert result.codes["OK"] or KNOWN[name].is_endless, "some of them still are good"


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_is_made_again_from_its_seed_and_number(name: str) -> None:
    calls = [make_call(KNOWN[name], 7, number) for number in (*range(200), *range(200))]
    assert calls[:200] == calls[200:]
    assert len({call.messages for call in calls}) > 20


def test_mutations_reach_every_field_and_every_kind_of_byte() -> None:
    random = Random(1)
    message = KNOWN["verifier/Generate"].first(random)
    assert isinstance(message, verifier_pb2.GenerateRequest)
    seen: set[str] = set()
    num_broken = 0
    for _ in range(4000):
        parsed = verifier_pb2.GenerateRequest()
        try:
            parsed.ParseFromString(mutated(message, random))
        except DecodeError:
            num_broken += 1
        else:
            seen |= {field.name for part in (parsed.sampling, parsed.speculation) for field, _ in part.ListFields()}
    assert 400 < num_broken < 2000
    fields = (*types_pb2.SamplingParams.DESCRIPTOR.fields, *types_pb2.SpeculationParams.DESCRIPTOR.fields)
    assert seen == {field.name for field in fields}


@pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path.path != "/page/load"])
@pytest.mark.suite
async def test_no_mutated_request_does_harm(servers: Servers, gateway: FuzzedGateway, name: str) -> None:
    result = await fuzz_gateway(gateway, servers, PATHS[name], NUM_REQUESTS, seed=0)
    assert not result.findings, "\n\n".join(result.findings)
    assert result.num_messages >= NUM_REQUESTS
    assert result.codes["400"], "some of them are wrong"
    assert result.codes["200"] or name == "gateway/page", "some of them still are good"


def test_a_request_is_made_again_from_its_seed_and_number() -> None:
    path = PATHS["gateway/chat_completions"]
    calls = [make_http_call(path, 7, number) for number in (*range(200), *range(200))]
    assert calls[:200] == calls[200:]
    assert len({call.pieces for call in calls}) > 190
    assert {call.end for call in calls} >= {"read", "half_close", "leave", "abort"}
