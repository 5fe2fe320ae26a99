"""Clients that share no code with ours, unchanged: OpenAI's for Node, LangChain, litellm, schemathesis."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from outrider_client.client import Client
from tests.support.gateways import RunningGateway, running_services

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(480)]

MODEL = "demo/target"
PROMPT = "def add(a, b):\n"
HELLO = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_services() as running:
        yield running


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    resolving = [found, "-e", 'require.resolve("openai")']
    if found is None or subprocess.run(resolving, capture_output=True, timeout=60, check=False).returncode:  # type: ignore[arg-type]
        pytest.skip("node with openai (in NODE_PATH) is not installed")
    return found


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("OUTRIDER_CLIENTS_PYTHON", "")
    if not found:
        pytest.skip("OUTRIDER_CLIENTS_PYTHON names no Python with langchain-openai, litellm and schemathesis")
    return found


async def run(*command: str, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    # Our packages are not on the path, because the environment is theirs.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe, env={**inherited, **(environment or {})}, cwd=folder
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 400)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, f"{output.decode()[-8000:]}\n{errors.decode()[-4000:]}"
    return output.decode()


async def directly(gateway: RunningGateway, prompt: Any, **options: Any) -> str:
    async with Client(gateway.gateway.settings.upstream) as client:
        return (await client.complete(prompt, **options)).text


async def test_the_client_for_node(gateway: RunningGateway, node: str) -> None:
    script = Path(__file__).with_name("openai_js_client.js")
    told = json.loads(await run(node, str(script), f"http://{gateway.address}/v1", MODEL, PROMPT))
    assert told["models"] == [MODEL]
    assert told["completion"] == await directly(gateway, PROMPT, seed=5, max_tokens=20)
    assert told["chat"] == await directly(gateway, HELLO, seed=7, max_tokens=20)
    assert told["usage"]["completion_tokens"] == 20
    assert told["call"]["name"] == "weather"
    assert json.loads(told["call"]["arguments"])["city"] in ("Rome", "Oslo")
    assert told["streamedCall"]["arguments"] == told["call"]["arguments"]
    assert told["errors"] == [
        {"kind": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_value"},
        {"kind": "NotFoundError", "status": 404, "param": "model", "code": "model_not_found"},
    ]
    assert told["first"]


@pytest.mark.suite
async def test_langchain_and_litellm(gateway: RunningGateway, python: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("other_clients.py")
    # Otherwise it asks GitHub for prices.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
    output = await run(python, str(script), f"http://{gateway.address}/v1", MODEL, PROMPT, environment=quiet)
    told = json.loads(output.splitlines()[-1])
    chain, lite = told["langchain"], told["litellm"]
    chat = await directly(gateway, HELLO, seed=7, max_tokens=20)
    text = await directly(gateway, PROMPT, seed=7, max_tokens=20)
    assert (chain["invoke"], chain["stream"]) == (chat, chat)
    # LangChain's own default temperature.
    assert chain["completion"] == await directly(gateway, PROMPT, seed=7, max_tokens=20, temperature=0.7)
    assert chain["batch"][0] == chat
    assert chain["batch"][1] not in ("", chat)
    assert chain["usage"]["output_tokens"] == chain["logprobs"] == 20
    assert chain["structured"]["verdict"] in ("yes", "no")
    ((name, arguments),) = chain["calls"]
    assert name == "weather"
    assert arguments["city"] in ("Rome", "Oslo")
    assert chain["streamed_calls"] == chain["calls"]
    assert chain["tool"] == f"fair in {arguments['city']}"
    assert (lite["completion"], lite["stream"], lite["text"], lite["usage"]) == (chat, chat, text, 20)
    assert lite["errors"] == [["BadRequestError", 400], ["NotFoundError", 404]]


@pytest.mark.suite
async def test_schemathesis_finds_no_answer_that_the_description_does_not_tell_of(
    gateway: RunningGateway, python: str, tmp_path: Path, full: bool
) -> None:
    command = [str(Path(python).with_name("schemathesis")), "--no-color", "run"]
    command += [f"http://{gateway.address}/openapi.json", "--seed", "1", "--max-examples", "100" if full else "5"]
    command += ["--phases", "coverage,fuzzing" if full else "fuzzing", "--checks", "all"]
    # The verifier checks ranges, and the one here has no health service.
    command += ["--exclude-checks", "positive_data_acceptance", "--exclude-path", "/health"]
    # A text without a limit is as long as the context.
    command += ["--report-dir", str(tmp_path), "--no-shrink", "--request-timeout", "120"]
    # A failure gives another exit status.
    assert "passed" in await run(*command, folder=tmp_path)
