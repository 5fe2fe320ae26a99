"""A draft model in the verifier's own process: the texts equal those with any other drafter, and none gets lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.graphs import Results
from outrider.models.cuda.loop import LOOP_LENS
from outrider.models.loading import CannotLoadModel, LoadedModel, is_same_gpu
from outrider.server.run import CannotLoad
from outrider.server.settings import parse_settings
from outrider.verifier import in_process_speculator
from outrider.verifier import service as service_module
from outrider.verifier.in_process_speculator import InProcessSpeculator, load_draft_model, read_draft_weights
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from outrider_client.client import Client
from outrider_client.generation import Result
from tests.support.cuda_twins import TWINS, fake_graph
from tests.support.failing_runner import FailingRunner, with_failing_runner
from tests.support.metric_values import values_of
from tests.support.services import RunningVerifier, draft_model, running_verifier, target_model
from tests.support.tiny_models import build
from tests.support.variants import VARIANTS, options_of
from tests.support.waiting import until

PROMPT = "class TestQueue(unittest.TestCase):\n    def test_"


async def generate(verifier: RunningVerifier, method: str = "speculative", **options: Any) -> Result:
    settings = {"seed": 5, "max_tokens": 48, "ignore_eos": True, "temperature": 0.7, "method": method, **options}
    async with Client(verifier.address) as client:
        return await client.complete(PROMPT, **settings)


def speculator_of(verifier: RunningVerifier) -> InProcessSpeculator:
    serving = verifier.servicer._serving
    assert serving is not None
    assert isinstance(serving.speculators, InProcessSpeculator)
    return serving.speculators


@pytest.fixture(params=[False, True], ids=["own thread", "target's thread"])
def shares_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes both models take turns on one thread, as on one GPU, or not."""
    if request.param:
        monkeypatch.setattr(service_module, "shares_gpu", lambda settings: True)


@pytest.fixture
async def verifier(shares_thread: None) -> AsyncIterator[RunningVerifier]:
    async with running_verifier(draft=draft_model()) as running:
        yield running


@pytest.fixture
async def breakable(shares_thread: None) -> AsyncIterator[tuple[RunningVerifier, FailingRunner]]:
    model, runner = with_failing_runner(draft_model())
    async with running_verifier(draft=model) as running:
        yield running, runner


@pytest.mark.slow
async def test_the_text_is_the_same_under_every_method(verifier: RunningVerifier) -> None:
    options = {variant: options_of(variant) for variant in VARIANTS}
    for rows in ("tree", "chain"):
        options[f"in turns, {rows}"] = {"method": "best-first", "rows": rows, "best_first": {"serial": True}}
    texts = {
        variant: (await generate(verifier, allow_fallback=True, **chosen)).token_ids
        for variant, chosen in options.items()
    }
    assert {variant for variant, text in texts.items() if text != texts["off"]} == set()


async def test_its_drafts_are_verified_and_nothing_is_sent_for_them(verifier: RunningVerifier) -> None:
    result = await generate(verifier)
    assert result.summary.accepted_by_source[0].num_tokens == result.summary.num_accepted_tokens > 0
    assert result.bytes_per_accepted_token == 0
    assert not result.summary.degraded
    drafter = speculator_of(verifier).drafter
    assert drafter.counts.num_opened == 1
    await until(lambda: drafter.num_sessions == 0)


async def test_the_ratio_rule_judges_its_drafts_by_the_rows_that_they_were_drawn_from(
    verifier: RunningVerifier,
) -> None:
    result = await generate(verifier, acceptance_rule="ratio", temperature=1.0)
    assert len(result.token_ids) == 48
    assert result.summary.num_accepted_tokens > 0


async def test_a_text_goes_on_when_its_engine_loses_the_session_and_is_drafted_for_again(
    breakable: tuple[RunningVerifier, FailingRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process_speculator, "FIRST_RETRY_S", 0.0)
    verifier, runner = breakable
    plain = await generate(verifier, "off", max_tokens=300)
    async with Client(verifier.address) as client:
        generation = client.generate(
            PROMPT, seed=5, max_tokens=300, ignore_eos=True, temperature=0.7, method="speculative"
        )
        num_drafted_since = 0
        async for chunk in generation:
            if not runner.num_failed and chunk.num_drafted:
                runner.fails = lambda segments: not runner.num_failed
            elif runner.num_failed:
                num_drafted_since += chunk.num_drafted
        summary = generation.result.summary
    assert generation.result.token_ids == plain.token_ids
    assert (summary.num_speculator_losses, summary.degraded) == (1, True)
    assert speculator_of(verifier).drafter.counts.num_opened == 2
    assert num_drafted_since > 0


async def test_an_engine_that_fails_every_step_costs_no_text_and_is_reported(
    breakable: tuple[RunningVerifier, FailingRunner],
) -> None:
    verifier, runner = breakable
    plain = await generate(verifier, "off")
    runner.fails = lambda segments: True
    speculator = speculator_of(verifier)
    for _ in range(3):
        assert (await generate(verifier)).token_ids == plain.token_ids
        await until(lambda: speculator.drafter.num_sessions == 0)
    assert verifier.engine.fault() == ""
    async with Client(verifier.address) as client:
        [info] = (await client.info()).speculators
    assert not info.connected
    assert "steps in a row have failed" in info.last_error
    values = values_of(verifier.servicer.metrics())
    assert values["outrider_speculator_up"] == {"in-process": 0}
    runner.fails = lambda segments: False
    assert (await generate(verifier)).summary.num_accepted_tokens > 0
    assert speculator.infos()[0].connected


async def test_an_engine_whose_thread_has_ended_is_started_again(verifier: RunningVerifier) -> None:
    plain = await generate(verifier, "off")
    speculator = speculator_of(verifier)
    await asyncio.to_thread(speculator.drafter.stop)
    assert not speculator.infos()[0].connected
    result = await generate(verifier)
    assert result.token_ids == plain.token_ids
    assert result.summary.num_accepted_tokens > 0
    assert speculator.num_restarts == 1


async def test_a_text_that_outgrows_the_draft_models_context_goes_on_without_it() -> None:
    num_prompt_tokens = 24
    async with running_verifier(draft=replace(draft_model(), max_context_len=num_prompt_tokens + 20)) as verifier:
        plain = await generate(verifier, "off", max_tokens=60)
        result = await generate(verifier, max_tokens=60)
        assert result.token_ids == plain.token_ids
        assert result.summary.num_speculator_losses == 1
        assert speculator_of(verifier).drafter.counts.num_opened == 1


async def test_the_server_describes_it_and_exports_its_counts(verifier: RunningVerifier) -> None:
    async with (
        Client(verifier.address) as client,
        client.generate(PROMPT, seed=1, max_tokens=200, method="pearl", ignore_eos=True) as generation,
    ):
        await anext(aiter(generation))
        info = await client.info()
        values = values_of(verifier.servicer.metrics())
    [described] = info.speculators
    assert (described.address, described.connected, described.num_own_sessions) == ("in-process", True, 1)
    assert values["outrider_speculator_own_sessions"] == {"in-process": 1}
    assert values["outrider_draft_sessions_total"] == {"": 1}
    names = [metric.name for metric in verifier.servicer.metrics()]
    assert len(names) == len(set(names))
    assert {"outrider_kv_cache_tokens", "outrider_draft_kv_cache_tokens"} <= set(names)


async def test_a_draft_model_with_another_tokenizer_is_refused_by_the_flag() -> None:
    with pytest.raises(
        CannotLoad, match=r"^--draft-model demo/draft: its tokenizer must be that of --model demo/target"
    ):
        async with running_verifier(draft=replace(draft_model(), tokenizer_hash="another")):
            pass


def test_a_draft_model_that_cannot_be_had_is_named_by_its_own_flag() -> None:
    settings = VerifierSettings(drafter="in-process", draft_model="/no/such/folder")
    with pytest.raises(CannotLoadModel, match=r"^--draft-model /no/such/folder: no such folder"):
        load_draft_model(settings.draft)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            "--drafter in-process --speculator 127.0.0.1:50052",
            "--speculator must be empty with --drafter in-process: drafts come from one of them, got '127.0.0.1:50052'",
        ),
        ("--draft-model demo/draft", "--draft-model needs --drafter in-process: a speculator has its own"),
        ("--draft-keep-warm-ms 5", "--draft-keep-warm-ms needs --drafter in-process: a speculator has its own"),
        (
            "--drafter in-process --draft-device tpu",
            "--draft-device (or OUTRIDER_VERIFIER_DRAFT_DEVICE): must be cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or "
            "mps, got 'tpu'",
        ),
        (
            "--drafter in-process --draft-kv-cache-tokens 5",
            "--draft-kv-cache-tokens must be 0 or at least 512, 8 blocks of --kv-block-size, got 5",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(VerifierSettings, flags.split())
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_the_draft_model_is_where_the_target_is_and_in_float32_on_a_cpu_unless_flags_say_otherwise() -> None:
    chosen = {
        (device, draft_device): (settings.draft.device, settings.draft.dtype)
        for device, draft_device in [("cpu", None), ("cuda:1", None), ("cuda:1", "cpu"), ("cpu", "cuda:0")]
        for settings in [VerifierSettings(drafter="in-process", device=device, draft_device=draft_device)]
    }
    assert chosen == {
        ("cpu", None): ("cpu", "float32"),
        ("cuda:1", None): ("cuda:1", "auto"),
        ("cuda:1", "cpu"): ("cpu", "float32"),
        ("cpu", "cuda:0"): ("cuda:0", "auto"),
    }


def test_models_on_devices_of_their_own_divide_nothing() -> None:
    for pair in (("cpu", "cpu"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1"), ("cuda", "cuda:1"), ("mps", "mps")):
        assert not is_same_gpu(*pair)


async def test_the_verifier_is_ready_when_the_draft_models_steps_are_captured_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[tuple[bool, bool]] = []

    def capture(compute: Callable[[], Results]) -> Callable[[], Results]:
        captured.append((service.serving is None, threading.current_thread() is threading.main_thread()))
        return fake_graph(compute)

    settings = VerifierSettings(drafter="in-process", default_method="off")
    service = VerifierService(settings, target_model(), {1: 2.0})

    def load(*_arguments: Any) -> LoadedModel:
        backend = CudaBackend(TWINS, lambda: capture)
        runner = backend.make_runner(build("qwen3"), num_blocks=8, is_exact=True)
        return replace(draft_model(), runner=runner)

    monkeypatch.setattr(in_process_speculator, "load_for", load)
    await service.load()
    await service.close()
    # The layers below the head, the head, and each number of steps, once each: the engine captures nothing again.
    assert captured == [(True, False)] * (2 + len(LOOP_LENS))


def test_weights_that_were_read_before_are_those_that_are_loaded() -> None:
    flags = VerifierSettings(drafter="in-process", draft_model="demo/draft", num_threads=1).draft
    weights = read_draft_weights(flags)
    model, _ = load_draft_model(flags, weights)
    assert model.tokenizer is weights.tokenizer


def test_a_pool_that_has_no_room_is_named_by_the_draft_models_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_arguments: Any) -> None:
        raise CannotLoadModel("--kv-cache-tokens 640 tokens take 1.00 GiB")

    monkeypatch.setattr(in_process_speculator, "load_for", load)
    with pytest.raises(CannotLoadModel, match=r"^--draft-kv-cache-tokens 640"):
        load_draft_model(VerifierSettings(drafter="in-process").draft)
