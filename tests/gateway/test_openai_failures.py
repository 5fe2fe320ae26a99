"""OpenAI's Python client and failures: its exceptions, its retries, calls that are given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from tests.support.certificates import credentials_file, entry
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import RunningVerifier, running_verifier
from tests.support.waiting import until

pytestmark = pytest.mark.slow

MODEL = "demo/target"
HELLO: Any = [{"role": "user", "content": "hello"}]


def opened(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def verified() -> AsyncIterator[tuple[RunningGateway, RunningVerifier]]:
    async with running_verifier(max_num_sessions=1) as verifier, running_gateway(verifier.address) as gateway:
        yield gateway, verifier


async def test_a_bad_request_names_the_parameter(verified: tuple[RunningGateway, RunningVerifier]) -> None:
    async with opened(verified[0]) as client:
        with pytest.raises(openai.BadRequestError) as failed:
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert (failed.value.status_code, failed.value.param, failed.value.code) == (
            400,
            "temperature",
            "invalid_value",
        )
        assert failed.value.type == "invalid_request_error"
        assert isinstance(failed.value.body, dict)
        assert failed.value.body["param"] == "temperature"
        assert failed.value.request_id
        with pytest.raises(openai.BadRequestError) as failed:
            await client.completions.create(model=MODEL, prompt=[5] * 3000)
        assert failed.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as failed:
            await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"temprature": 1})
        assert (failed.value.code, failed.value.param) == ("unsupported_parameter", "temprature")
        assert "did you mean temperature" in failed.value.message


async def test_a_model_that_is_not_served_and_a_path_that_is_not_there(
    verified: tuple[RunningGateway, RunningVerifier],
) -> None:
    async with opened(verified[0]) as client:
        with pytest.raises(openai.NotFoundError) as failed:
            await client.completions.create(model="gpt-5", prompt="a")
        assert (failed.value.code, failed.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model=MODEL, input="a", encoding_format="float")


async def test_a_full_server_is_a_rate_limit_and_the_client_comes_again_when_it_is_told(
    verified: tuple[RunningGateway, RunningVerifier],
) -> None:
    gateway, verifier = verified
    async with opened(gateway) as client:
        running = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.RateLimitError) as failed:
            await client.completions.create(model=MODEL, prompt="a")
        assert failed.value.code == "rate_limit_exceeded"
        assert int(failed.value.response.headers["retry-after"]) >= 1
        waiting = asyncio.create_task(
            client.with_options(max_retries=8).completions.create(model=MODEL, prompt="a", max_tokens=3)
        )
        await running.close()
        assert (await waiting).usage is not None
        assert await verifier.is_idle()


async def test_a_gateway_with_a_token_of_its_own_lends_it_to_nobody(tmp_path: Path) -> None:
    file = credentials_file(tmp_path / "credentials", entry("t0ken", "generate"))
    gate = Gate(credential_book(str(file), has_client_certificates=False), "outrider.v1.VerifierService")
    (tmp_path / "token").write_text("t0ken")
    own = {"peer_token_file": str(tmp_path / "token")}
    async with running_verifier(interceptors=[gate]) as verifier, running_gateway(verifier.address, **own) as gateway:
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            for headers in ({}, {"authorization": "Bearer wr0ng"}):
                refused = await gateway.http.get(path, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            admitted = await gateway.http.get(path, headers={"authorization": "Bearer t0ken"})
            assert admitted.status_code == 200
        async with gateway.http.stream("GET", "/page/load") as stream:
            event = await anext(stream.aiter_text())
        assert '"invalid_api_key"' in event
        assert "num_sessions" not in event


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cancelled_ends_its_session(
    verified: tuple[RunningGateway, RunningVerifier], stream: bool
) -> None:
    gateway, verifier = verified
    async with opened(gateway) as client:

        async def ask() -> None:
            given: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
            told: Any = await client.completions.create(model=MODEL, prompt="a", stream=stream, **given)
            async for _ in told:
                pass

        asking = asyncio.create_task(ask())
        await until(lambda: verifier.engine.num_sessions == 1)
        asking.cancel()
        assert await verifier.is_idle()


async def test_the_blocking_client_has_the_same_exceptions_and_streams(
    verified: tuple[RunningGateway, RunningVerifier],
) -> None:
    gateway, verifier = verified

    def ask() -> str:
        url = f"http://{gateway.address}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=httpx.Client()) as client:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model=MODEL, prompt="a", n=-1)
            with client.completions.create(
                model=MODEL, prompt="a", stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
            ) as stream:
                return next(iter(stream)).choices[0].text  # leaving the block closes the connection

    await asyncio.to_thread(ask)
    assert await verifier.is_idle()
