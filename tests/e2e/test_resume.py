"""Verifiers as processes: one is killed, or hangs, and its generations continue at the other as if nothing had
happened."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import ANY_PORT, Service
from outrider_client.blocking import BlockingClient, BlockingGeneration
from outrider_client.client import Client
from outrider_client.errors import Unavailable
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

pytestmark = [pytest.mark.slow, pytest.mark.suite]

PROMPT = "import heapq\n\ndef dijkstra(graph, start):\n    "
OPTIONS = GenerateOptions(temperature=0.7, seed=21, max_tokens=600, ignore_eos=True)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    """Two replicas, which get hurt. In bfloat16 if the CPU has it."""
    folder = tmp_path_factory.mktemp("logs")
    flags = ("--model", "demo/target", "--dtype", "auto", "--num-threads", "1")
    with ExitStack() as exits:
        replicas = []
        for number in range(2):
            service = Service("verifier", "outrider.verifier", flags, folder / f"{number}.log", listen=ANY_PORT)
            exits.callback(service.stop)
            service.spawn()
            replicas.append(service)
        for service in replicas:
            service.wait_listening()
            service.wait_serving()
        yield replicas[0], replicas[1]


@pytest.fixture(scope="module")
def whole(verifiers: tuple[Service, Service]) -> Result:
    """The text without faults."""
    with BlockingClient(verifiers[0].address) as client:
        return client.complete(PROMPT, **OPTIONS)


def addresses(verifiers: tuple[Service, Service]) -> list[str]:
    return [service.address for service in verifiers]


def one_in_use(verifiers: tuple[Service, Service]) -> Service:
    """The replica that generates."""
    for service in verifiers:
        with contextlib.suppress(Unavailable), BlockingClient(service.address) as client:
            if client.info().num_sessions:
                return service
    raise AssertionError("nobody generates")


def read(generation: BlockingGeneration, hurt: Callable[[], object]) -> Result:
    """Returns the result; calls `hurt` after the first chunk."""
    next(generation)
    hurt()
    for _ in generation:
        pass
    return generation.result


def revive(verifiers: tuple[Service, Service]) -> None:
    for service in verifiers:
        if not service.is_running:
            service.restart()


async def test_a_killed_verifier_s_generations_go_on_at_the_other(
    verifiers: tuple[Service, Service], whole: Result
) -> None:
    try:
        async with Client(addresses(verifiers)) as client, client.generate(PROMPT, **OPTIONS) as generation:
            await anext(generation)
            one_in_use(verifiers).kill()
            async for _ in generation:
                pass
        with BlockingClient(addresses(verifiers)) as blocking:
            later = blocking.complete(PROMPT, **OPTIONS)
    finally:
        revive(verifiers)
    assert (generation.result.token_ids, generation.result.text) == (whole.token_ids, whole.text)
    assert (later.token_ids, later.text) == (whole.token_ids, whole.text)
    assert (generation.num_resumes, later.num_resumes) == (1, 0)


def test_a_stream_over_http_goes_on_at_the_other(
    verifiers: tuple[Service, Service], whole: Result, tmp_path: Path
) -> None:
    flags = ["--upstream", ",".join(addresses(verifiers))]
    gateway = ManagedProcess("gateway", "outrider_gateway", flags, tmp_path / "gateway.log", listen=ANY_PORT)
    try:
        gateway.start()
        with openai.OpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="demo/target",
                prompt=PROMPT,
                stream=True,
                stream_options={"include_usage": True},
                temperature=0.7,
                seed=21,
                max_tokens=600,
                extra_body={"ignore_eos": True, "speculation_report": ["sources"]},
            )
            pieces = [next(stream)]
            one_in_use(verifiers).kill()
            *rest, last = stream
    finally:
        gateway.stop()
        revive(verifiers)
    assert "".join(piece.choices[0].text for piece in [*pieces, *rest]) == whole.text
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.num_output_tokens
    assert last.model_extra is not None
    assert last.model_extra["speculation"]["num_resumes"] == 1


def test_when_both_have_been_killed_the_first_that_is_back_goes_on(
    verifiers: tuple[Service, Service], whole: Result
) -> None:
    hurt: list[Service] = []
    options = GenerateOptions(**OPTIONS, method="off")  # a chunk for every token: the 120th is far from the end
    try:
        with BlockingClient(addresses(verifiers)) as client, client.generate(PROMPT, **options) as generation:
            for number, _ in enumerate(generation):
                if number in (20, 120):
                    hurt.append(one_in_use(verifiers))
                    hurt[-1].kill()
                    hurt[-1].spawn()  # it comes back while the other one goes on, or while none does
    finally:
        for service in hurt:
            service.wait_listening()
            service.wait_serving()
    assert len(set(hurt)) == 2
    assert (generation.result.token_ids, generation.result.text) == (whole.token_ids, whole.text)
    assert generation.num_resumes == 2


def test_a_verifier_that_is_stopped_in_order_ends_what_it_has_begun(
    verifiers: tuple[Service, Service], whole: Result
) -> None:
    lone = verifiers[0]
    with BlockingClient(lone.address) as client, client.generate(PROMPT, **OPTIONS) as generation:
        result = read(generation, lone.restart)
    assert (result.token_ids, result.text, result.num_resumes) == (whole.token_ids, whole.text, 0)


@pytest.mark.parametrize("stall_timeout_s", [1.0, None])
def test_a_verifier_that_hangs_is_left(
    verifiers: tuple[Service, Service], whole: Result, stall_timeout_s: float | None
) -> None:
    hung: list[int] = []

    def hang() -> None:
        hung.append(one_in_use(verifiers).pid)
        os.kill(hung[0], signal.SIGSTOP)

    options = GenerateOptions(**OPTIONS, stall_timeout_s=stall_timeout_s)
    try:
        with BlockingClient(addresses(verifiers)) as client, client.generate(PROMPT, **options) as generation:
            began = time.monotonic()
            result = read(generation, hang)
            took_s = time.monotonic() - began
            after = client.complete(PROMPT, **options)  # no client asks the one that hangs
    finally:
        os.kill(hung[0], signal.SIGCONT)
    assert (result.token_ids, result.text, result.num_resumes) == (whole.token_ids, whole.text, 1)
    assert (after.token_ids, after.num_resumes) == (whole.token_ids, 0)
    assert took_s < 25  # without a stall timeout of its own, the keepalive notices within 15 s
