"""A draft model in the verifier's own process: the texts are those of any other drafter, and none is lost with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.blocks import PoolState
from outrider.core.methods import BEST_FIRST, OFF, PEARL
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import Source
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.tree import Draft
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.graphs import Results
from outrider.models.cuda.loop import LOOP_LENS
from outrider.models.loading import CannotLoadModel, LoadedModel, build_hf_model, is_same_gpu
from outrider.models.pool_size import Beside
from outrider.models.residency import Residency
from outrider.models.runner import cache_shape
from outrider.peers.speculator import MAX_PAUSED_TOKENS
from outrider.server.run import CannotLoad
from outrider.server.settings import parse_settings
from outrider.speculator.drafter import Drafter
from outrider.speculator.metrics import DraftCounts
from outrider.telemetry.tracing import NO_SPAN, SPECULATE, Span
from outrider.verifier import in_process_speculator
from outrider.verifier import service as service_module
from outrider.verifier.engine import Engine
from outrider.verifier.in_process_speculator import InProcessSpeculator, load_draft_model, read_draft_weights
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from outrider.wire.speculation import METHODS_TO_PROTO
from outrider_client.client import Client
from outrider_client.generation import Result
from tests.support.cuda_twins import TWINS, fake_graph
from tests.support.failing_runner import FailingRunner, with_failing_runner
from tests.support.metric_values import values_of
from tests.support.scripted_speculator import SPEC, Listener
from tests.support.services import RunningVerifier, draft_model, running_verifier, target_model
from tests.support.tiny_models import build
from tests.support.variants import VARIANTS, options_of
from tests.support.waiting import until

PROMPT = "class TestQueue(unittest.TestCase):\n    def test_"
PAUSE = Steering(SpeculationParams(OFF, 8, 32))
GO_ON = Steering(SpeculationParams(PEARL, 8, 32))


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
    """Has both models take turns on one thread, as on one GPU, or not."""
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
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_the_text_is_the_same_under_every_method(verifier: RunningVerifier, temperature: float) -> None:
    options = {variant: options_of(variant) for variant in VARIANTS}
    for rows in ("tree", "chain"):
        options[f"in turns, {rows}"] = {"method": "best-first", "rows": rows, "best_first": {"serial": True}}
    texts = {
        variant: (await generate(verifier, temperature=temperature, allow_fallback=True, **chosen)).token_ids
        for variant, chosen in options.items()
    }
    assert {variant for variant, text in texts.items() if text != texts["off"]} == set()


@pytest.mark.parametrize("shares_gpu", [False, True])
async def test_on_the_target_s_gpu_auto_begins_with_drafts_that_the_target_waits_for(
    verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch, *, shares_gpu: bool
) -> None:
    plain = await generate(verifier, "off")
    serving = verifier.servicer._serving
    assert serving is not None
    limits = replace(serving.limits, shares_gpu=shares_gpu)
    monkeypatch.setattr(verifier.servicer, "_serving", replace(serving, limits=limits))
    opened: list[SpeculationParams] = []
    open_session = Drafter.open

    def noted(drafter: Drafter, *asked: Any, **options: Any) -> None:
        opened.append(asked[4])
        open_session(drafter, *asked, **options)

    monkeypatch.setattr(Drafter, "open", noted)
    result = await generate(verifier, "auto")
    assert result.token_ids == plain.token_ids
    assert [(params.method, params.of(BestFirstParams).serial) for params in opened] == [(BEST_FIRST, shares_gpu)]
    assert result.summary.decisions[0].method == METHODS_TO_PROTO[BEST_FIRST]
    assert result.summary.num_accepted_tokens > 0


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


class Noted(Span):
    """A span that keeps what it is told, and its parts."""

    is_recorded = True

    def __init__(self, name: str = "") -> None:
        self.name, self.parts = name, list[Noted]()
        self.attributes: dict[str, Any] = {}
        self.ended: list[tuple[str, bool]] = []

    def child(self, name: str, kind: Any = "internal", attributes: Any = None) -> Noted:
        self.parts.append(Noted(name))
        return self.parts[-1]

    def set_attributes(self, attributes: Any) -> None:
        self.attributes |= attributes

    def end(self, status: str = "", *, is_error: bool = False) -> None:
        self.ended.append((status, is_error))


async def test_each_time_that_a_session_is_open_at_the_engine_is_a_part_of_its_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_process_speculator, "FIRST_RETRY_S", 0.0)
    span, drafter, text, listener = Noted(), Recorded(), [1, 2], Listener()
    monkeypatch.setattr(in_process_speculator, "current_span", lambda: span)
    target = Target(text)
    session = speculator(target, drafter).speculate(SPEC, text, listener)
    monkeypatch.setattr(in_process_speculator, "current_span", lambda: NO_SPAN)  # of whoever opens it later
    drafter.listeners[0].send(draft(2, 1, 7, 8))
    drafter.listeners[0].send(draft(2, 3, 9))
    assert listener.num_drafts == 2
    target.commit(7)
    session.on_failure(drafter.listeners[0])
    await until(lambda: len(drafter.opened) == 2)
    session.close()
    session.close()
    assert [part.name for part in span.parts] == [SPECULATE] * 2
    assert [part.ended for part in span.parts] == [[("UNAVAILABLE", True)], [("", False)]]
    assert span.parts[0].attributes == {
        "gen_ai.request.model": "demo/draft",
        "outrider.session_id": f"{SPEC.session_id}/1",
        "outrider.method": SPEC.speculation.method.name,
        "outrider.num_committed_tokens": 3,
        "outrider.num_drafts": 2,
        "outrider.num_drafted_tokens": 3,
    }
    assert span.parts[1].attributes["outrider.num_drafts"] == 0


async def test_the_share_of_the_time_that_its_engine_works_is_told_and_exported() -> None:
    now = [100.0]
    drafter = Recorded()
    in_process = InProcessSpeculator(lambda: cast(Drafter, drafter), cast(Engine, Target([1, 2])), lambda: now[0])
    session = in_process.speculate(SPEC, [1, 2], Listener())
    drafter.counts.busy_s, now[0] = 1.4, 102.0
    [info] = in_process.infos()
    assert (info.num_sessions, info.max_num_sessions, info.busy_percent) == (1, 4, 70)
    values = values_of(in_process.metrics())
    assert values["outrider_speculator_busy_ratio"] == {"in-process": 0.7}
    assert values["outrider_speculator_sessions"] == {"in-process": 1}
    session.close()
    now[0] = 104.0
    assert values_of(in_process.metrics())["outrider_speculator_busy_ratio"] == {"in-process": 0}


# What the engine is told.


@dataclass
class Recorded:
    """Stands for a drafter, and notes what it is told."""

    opened: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    listeners: list[Any] = field(default_factory=list)
    has_ended: bool = False
    forward_us: int = 100
    model: Any = field(default_factory=draft_model)
    max_num_sessions: int = 4
    num_sessions: int = 1
    counts: DraftCounts = field(default_factory=DraftCounts)

    def fault(self) -> str:
        return ""

    def pool_state(self) -> PoolState:
        return Residency[Any](self.model.runner.pool, self.max_num_sessions).state()

    def open(self, session_id: str, committed: list[int], *others: Any, **options: Any) -> None:
        self.opened.append((session_id, tuple(committed)))
        self.listeners.append(others[3])

    def commit(self, session_id: str, token_ids: list[int], acknowledged_node_id: int) -> None:
        self.told.append((session_id, tuple(token_ids), acknowledged_node_id))

    def steer(self, session_id: str, steering: Steering) -> None:
        self.told.append((session_id, steering))

    def close(self, session_id: str) -> None:
        self.told.append((session_id, "closed"))


class Target:
    """Stands for the target's engine, with one session: its text, which grows when the test says so."""

    def __init__(self, text: list[int]) -> None:
        self.session = SimpleNamespace(generation=SimpleNamespace(committed=text), take_commits=None)

    def post(self, session_id: str, action: Callable[[Any], object]) -> None:
        assert session_id == SPEC.session_id
        action(self.session)

    def commit(self, *token_ids: int) -> None:
        self.session.generation.committed.extend(token_ids)
        self.session.take_commits(self.session.generation.committed)


def speculator(target: Target, *drafters: Recorded) -> InProcessSpeculator:
    made = iter(drafters)
    return InProcessSpeculator(lambda: cast(Drafter, next(made)), cast(Engine, target))


def draft(base_len: int, first_node_id: int, *token_ids: int) -> Draft:
    return Draft(base_len, first_node_id, [1] * len(token_ids), list(token_ids), [], Source.DRAFT)


async def test_a_commit_has_the_tokens_since_the_last_one_and_the_latest_node_that_had_arrived() -> None:
    drafter, text, listener = Recorded(), [1, 2], Listener()
    target = Target(text)
    speculator(target, drafter).speculate(SPEC, text, listener)
    name = f"{SPEC.session_id}/1"
    assert drafter.opened == [(name, (1, 2))]
    target.commit(3)
    drafter.listeners[0].send(draft(3, 1, 7, 8))
    assert listener.num_drafts == 1
    target.commit(7, 8)
    target.commit()
    assert drafter.told == [(name, (3,), 0), (name, (7, 8), 2)]


async def test_what_was_committed_while_it_was_opened_is_told_at_once() -> None:
    drafter = Recorded()
    speculator(Target([1, 2, 3, 4]), drafter).speculate(SPEC, [1, 2], Listener())
    name = f"{SPEC.session_id}/1"
    assert drafter.opened == [(name, (1, 2))]
    assert drafter.told == [(name, (3, 4), 0)]


async def test_commits_of_a_pause_are_joined_and_told_when_it_goes_on() -> None:
    drafter, text = Recorded(), [1, 2]
    target = Target(text)
    session = speculator(target, drafter).speculate(SPEC, text, Listener())
    name = f"{SPEC.session_id}/1"
    session.send_steering(PAUSE)
    for token_id in range(3, 3 + MAX_PAUSED_TOKENS + 1):
        target.commit(token_id)
    session.send_steering(GO_ON)
    first, rest = tuple(text[2 : 2 + MAX_PAUSED_TOKENS]), tuple(text[2 + MAX_PAUSED_TOKENS :])
    assert drafter.told == [(name, PAUSE), (name, first, 0), (name, GO_ON), (name, rest, 0)]


async def test_a_lost_session_is_opened_anew_as_it_was_steered_and_the_lost_ones_drafts_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_process_speculator, "FIRST_RETRY_S", 0.0)
    drafter, text, listener = Recorded(), [1, 2], Listener()
    target = Target(text)
    session = speculator(target, drafter).speculate(SPEC, text, listener)
    session.send_steering(GO_ON)
    drafter.listeners[0].fail()
    drafter.listeners[0].send(draft(2, 1, 7))
    target.commit(3)
    await until(lambda: len(drafter.opened) == 2)
    again = f"{SPEC.session_id}/2"
    assert drafter.opened[1] == (again, (1, 2, 3))
    assert drafter.told[-1] == (again, GO_ON)
    assert listener.num_drafts == 0
    session.close()
    assert drafter.told[-1] == (again, "closed")


async def test_a_session_leaves_an_engine_that_has_ended_with_its_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process_speculator, "FIRST_RETRY_S", 0.0)
    drafters, text, listener = [Recorded(), Recorded()], [1, 2], Listener()
    target = Target(text)
    in_process = speculator(target, *drafters)
    in_process.speculate(SPEC, text, listener)
    drafters[0].has_ended = True
    target.commit(3)
    await until(lambda: listener.num_attached == 2)
    assert listener.num_detached == 1
    assert drafters[1].opened == [(f"{SPEC.session_id}/2", (1, 2, 3))]
    assert in_process.num_restarts == 1


async def test_a_session_that_is_closed_while_it_waits_is_not_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process_speculator, "FIRST_RETRY_S", 0.0)
    drafter, listener = Recorded(), Listener()
    session = speculator(Target([1, 2]), drafter).speculate(SPEC, [1, 2], listener)
    session.on_failure(drafter.listeners[0])
    assert listener.num_detached == 1
    session.close()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, later.set)  # after the timer of the session
    await later.wait()
    assert len(drafter.opened) == 1


@pytest.mark.parametrize(("device", "draft_device"), [("cuda:0", None), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
async def test_on_a_shared_gpu_the_targets_pool_leaves_room_for_the_drafts(
    device: str, draft_device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = build_hf_model("demo/draft")
    found: list[Any] = []

    def load_target(_settings: Any, beside: Any, **_: Any) -> Any:
        found.append(beside)
        raise CannotLoadModel("stop here")

    monkeypatch.setattr(service_module, "read_draft_weights", lambda flags: found.append(flags.device) or weights)
    monkeypatch.setattr(service_module, "load_for", load_target)
    chosen = {} if draft_device is None else {"draft_device": draft_device}
    settings = VerifierSettings.model_validate(
        {"drafter": "in-process", "device": device, "draft_kv_cache_tokens": 640, **chosen}
    )
    with pytest.raises(CannotLoad, match="stop here"):
        await VerifierService(settings).load()
    assert found == [draft_device or device, Beside(cache_shape(weights.model).bytes_per_slot, 640)]


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
    # Below the head, the head, and each number of steps once: the engine captures nothing again.
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
