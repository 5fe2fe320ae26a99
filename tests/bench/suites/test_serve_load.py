"""The load generator in virtual time: when requests arrive, are sent and end, to the millisecond, without waiting."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from scipy import stats

from outrider.core.params import Source
from outrider.v1 import verifier_pb2
from outrider_bench.config import ServeConfig
from outrider_bench.suites.serve.load import Load, Outcome, arrival_times
from outrider_bench.suites.serve.metrics import run_of
from outrider_cli.prompts import Prompt
from outrider_client.errors import Internal, OutriderError, ResourceExhausted
from outrider_client.generation import Chunk, FinishReason, Result
from tests.bench.virtual_loop import run_virtually, work_for

NUM_DRAWN = 20_000


def gaps_of(times: Sequence[float]) -> np.ndarray[Any, Any]:
    return np.diff(np.array([0.0, *times]))


def test_gaps_of_poisson_arrivals_are_exponential() -> None:
    gaps = gaps_of(arrival_times(4.0, NUM_DRAWN, 1.0, seed=7))
    assert gaps.mean() == pytest.approx(0.25)
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    # A gap tells nothing about the next one.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(("shape", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_a_gamma_distribution(shape: float, variation: float) -> None:
    gaps = gaps_of(arrival_times(2.0, NUM_DRAWN, shape, seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.03)
    assert stats.kstest(gaps, "gamma", args=(shape, 0, 0.5 / shape)).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.1, 1.0, math.inf])
def test_even_a_few_requests_arrive_at_the_rate_that_was_asked_for(burstiness: float) -> None:
    times = arrival_times(0.5, 3, burstiness, seed=1)
    assert times[-1] == pytest.approx(6.0)
    assert times == sorted(times)


def test_constant_arrivals_are_equally_far_apart() -> None:
    assert arrival_times(4.0, 3, math.inf, seed=5) == pytest.approx([0.25, 0.5, 0.75])


def test_at_an_infinite_rate_everything_arrives_at_once() -> None:
    assert arrival_times(math.inf, 3, 1.0, seed=5) == [0.0, 0.0, 0.0]


def test_a_seed_draws_the_same_arrivals_again_at_every_rate_and_another_seed_others() -> None:
    times = arrival_times(1.0, 50, 1.0, seed=5)
    assert arrival_times(1.0, 50, 1.0, seed=5) == times
    assert arrival_times(8.0, 50, 1.0, seed=5) == pytest.approx([time / 8 for time in times])
    assert arrival_times(1.0, 50, 1.0, seed=6) != times


@dataclass(frozen=True)
class Answer:
    """What comes of a request: chunks of so many tokens after so many seconds each, or an error at the end."""

    chunks: tuple[tuple[float, int], ...] = ((1.0, 2), (1.0, 3))
    error: OutriderError | None = None
    works_s: float = 0.0
    """Time for which the sending keeps the client from everything else."""


class ScriptedGeneration:
    """A generation of the SDK that follows an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        tokens = tuple(range(sum(count for _, count in answer.chunks)))
        summary = verifier_pb2.SpeculationSummary(num_rounds=2, num_drafted_tokens=4, num_accepted_tokens=3)
        self.result = Result("", tokens, FinishReason.LENGTH, None, 1, 9, len(tokens), summary)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def __aiter__(self) -> Any:
        for pause_s, count in self._answer.chunks:
            await asyncio.sleep(pause_s)
            sources = [Source.DRAFT] * (count - 1) + [Source.TARGET] if count else []
            yield Chunk(tuple(range(count)), tuple(sources), "", 4 if count > 1 else 0)
        if self._answer.error is not None:
            raise self._answer.error


@dataclass
class ScriptedClient:
    """A client of the SDK that answers each request as it is told; the last answer goes for all further ones."""

    answers: Sequence[Answer] = (Answer(),)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def generate(self, prompt: str, **options: Any) -> ScriptedGeneration:
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append((prompt, options))
        work_for(answer.works_s)
        return ScriptedGeneration(answer)


def config_of(count: int, **settings: Any) -> ServeConfig:
    return ServeConfig(
        **{"num_prompts": count, "prompts": (Prompt("a"), Prompt("b")), "arrival": "constant"} | settings
    )


def offered(client: ScriptedClient, rate: float, count: int, *, for_s: float = math.inf, **settings: Any) -> Load:
    """The load after its run; `for_s` cancels it then, as Ctrl-C does."""

    async def run() -> Load:
        load = Load(client, config_of(count, **settings), rate)  # type: ignore[arg-type]  # as far as it is used
        work = asyncio.ensure_future(load.offer())
        await asyncio.wait([work], timeout=None if math.isinf(for_s) else for_s)
        if not work.done():
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
        else:
            await work
        return load

    return run_virtually(run())


def in_order(load: Load) -> list[Outcome]:
    return sorted(load.outcomes, key=lambda outcome: outcome.index)


def test_requests_are_sent_when_they_are_due_however_slow_the_server_is() -> None:
    load = offered(ScriptedClient([Answer(((100.0, 1),))]), 2.0, 4)
    assert [outcome.sent_s for outcome in in_order(load)] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert [outcome.ended_s for outcome in in_order(load)] == pytest.approx([100.5, 101.0, 101.5, 102.0])
    assert load.duration_s == pytest.approx(102.0)


def test_times_of_a_generation_count_from_its_sending() -> None:
    [outcome] = offered(ScriptedClient([Answer(((0.25, 1), (0.5, 3), (0.125, 0)))]), 1.0, 1).outcomes
    made = outcome.generation
    assert made is not None
    assert [(chunk.at_s, chunk.num_tokens) for chunk in made.chunks] == [(0.25, 1), (0.75, 3)], "tokens, not text alone"
    assert made.duration_s == 0.875
    assert (made.num_prompt_tokens, len(made.token_ids), made.rounds.num_accepted) == (9, 4, 3)
    assert outcome.kept == (2,), "the round without a draft kept none"


def test_a_limit_of_requests_at_a_time_makes_the_others_wait_before_they_are_sent() -> None:
    load = offered(ScriptedClient(), math.inf, 5, max_concurrency=2)
    outcomes = in_order(load)
    assert [outcome.arrived_s for outcome in outcomes] == [0.0] * 5
    assert [outcome.sent_s for outcome in outcomes] == [0.0, 0.0, 2.0, 2.0, 4.0]
    run = run_of(load, config_of(5, max_concurrency=2), "a model")
    assert (run["mean_ttft_ms"], run["mean_e2el_ms"]) == (1000, 2000), "from the sending"
    assert (run["mean_client_queue_time_ms"], run["mean_e2el_including_client_queue_ms"]) == (1600, 3600)
    assert (run["max_concurrency"], run["max_concurrent_requests"]) == (2, 2)


def test_a_generator_that_is_held_up_shows_how_late_it_was() -> None:
    # The first request, due at 1 s, takes the generator 2.5 s; the next ones are due at 2, 3 and 4 s.
    outcomes = in_order(offered(ScriptedClient([Answer(works_s=2.5), Answer()]), 1.0, 4))
    assert [outcome.arrived_s - outcome.due_s for outcome in outcomes] == pytest.approx([0.0, 1.5, 0.5, 0.0])


def test_a_failure_keeps_its_kind_and_words_and_the_others_go_on() -> None:
    full = Answer((), ResourceExhausted("too many sessions"))
    broken = Answer(((1.0, 2),), Internal("the model is broken"))
    load = offered(ScriptedClient([full, Answer(), broken]), 1.0, 3)
    assert [(outcome.error, outcome.message) for outcome in in_order(load)] == [
        ("RESOURCE_EXHAUSTED", "too many sessions"),
        ("", ""),
        ("INTERNAL", "the model is broken"),
    ]
    assert load.num_completed == 1
    assert [outcome.index for outcome in load.failures()] == [0, 2]


def test_a_run_that_is_cut_short_keeps_what_has_ended() -> None:
    # Each takes 2 s: those sent at 1 and 2 s have ended, those of 3 and 4 s run, that of 5 s was never sent.
    load = offered(ScriptedClient(), 1.0, 5, for_s=4.5)
    assert [outcome.index for outcome in load.outcomes] == [0, 1]
    assert load.duration_s == pytest.approx(4.5)
    run = run_of(load, config_of(5), "a model")
    assert (run["completed"], run["failed"], run["unfinished"]) == (2, 0, 3)
    assert run["request_throughput"] == pytest.approx(2 / 4.5)


def test_a_run_and_its_repetition_send_the_same_requests_each_with_a_seed_of_its_own() -> None:
    runs = []
    for seed in (0, 0, 1):
        client = ScriptedClient()
        offered(client, math.inf, 3, seed=seed, options={"temperature": 0.7})
        runs.append(client.requests)
    assert [prompt for prompt, _ in runs[0]] == ["a", "b", "a"], "prompts come again where they are fewer"
    assert runs[0] == runs[1]
    seeds = {options["seed"] for requests in runs for _, options in requests}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert runs[0][0][1] == {"temperature": 0.7, "seed": 0, "resume": False, "stall_timeout_s": math.inf}
