"""Steps that a GPU makes in one go send the same messages as single steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from outrider.core.methods import BEST_FIRST, CARD, DOUBLE, OFF, PEARL, SPECULATIVE
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import AcceptanceRule, Rows, SamplingParams
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.tree import Draft
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.rows import UNSETTLED
from outrider.models.draws import RowDraws
from outrider.models.runner import Runner, Segment
from outrider.speculator.engine import Engine
from outrider.speculator.session import DraftSessionSpec
from tests.support.cuda_twins import TWIN_GPU, TWINS, best_tokens
from tests.support.services import draft_model
from tests.support.tiny_models import VOCAB_SIZE, build, text

CHAIN = SpeculationParams(SPECULATIVE, num_speculative_tokens=5, lookahead=5)
AHEAD = SpeculationParams(PEARL, num_speculative_tokens=4, lookahead=16, min_path_probability=0.01)
IN_TURNS = SpeculationParams(BEST_FIRST, 12, 12, rows=Rows.TREE, own=(BestFirstParams(serial=True),))
IN_TURNS_TO_THE_END = replace(IN_TURNS, rows=Rows.CHAIN)
"""A chain grows while that pays, however improbable its path becomes."""
SPECS: list[tuple[SamplingParams, SpeculationParams]] = [
    (SamplingParams(seed=1, temperature=0.7), CHAIN),
    (SamplingParams(temperature=0.0), AHEAD),
    (SamplingParams(seed=2, temperature=1.0, top_k=9, top_p=0.9), AHEAD),
    (SamplingParams(seed=3, temperature=0.5, repetition_penalty=1.2), CHAIN),
    (SamplingParams(seed=4), replace(CHAIN, acceptance_rule=AcceptanceRule.RATIO)),
    (SamplingParams(seed=5), replace(CHAIN, calibration=False)),
    (SamplingParams(seed=6), SpeculationParams(CARD)),
    (SamplingParams(seed=7), SpeculationParams(DOUBLE, num_speculative_tokens=6)),
    (SamplingParams(seed=8), replace(CHAIN, shared_noise=False)),
    (SamplingParams(seed=9, temperature=0.8), IN_TURNS),
]
DRAWN = (4,)
"""Sessions under the ratio rule."""
LOOPED = (0, 1, 2, 8, 9)
"""Sessions whose steps may be made in one go."""


class Sink:
    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def send(self, draft: Draft) -> None:
        # Times are never the same.
        self.drafts.append(draft._replace(forward_us=0, retrieval_us=0))

    def fail(self) -> None:
        raise AssertionError("the engine failed")


class Stepped:
    """An engine whose thread has ended; a test runs its steps."""

    def __init__(
        self,
        *,
        loops: bool,
        backend: CudaBackend = TWIN_GPU,
        **limits: Any,
    ) -> None:
        runner = backend.make_runner(build("qwen2"), **limits)
        if not loops:
            runner.make_loop = lambda: None  # type: ignore[method-assign]
        self.num_forwards = 0
        self.looped: list[int] = []
        self.told: list[tuple[int, int]] = []
        """For each forward, the number of rows with parameters of draws, and of rows with logits."""
        self._count(runner)
        model = replace(draft_model(), runner=runner, vocab_size=VOCAB_SIZE, max_context_len=512)
        self.engine = Engine(model)
        self.engine.stop()
        self.sinks: dict[str, Sink] = {}

    def _count(self, runner: Runner) -> None:
        forward, draft = runner.forward, runner.draft

        def counted(segments: Sequence[Segment], draws: RowDraws) -> Tensor:
            self.num_forwards += 1
            self.told.append((len(draws.params), sum(segment.num_logits for segment in segments)))
            found = forward(segments, draws=draws)
            # The forward has copied the parameters of its draws with its inputs.
            assert draws.on_device is not None or not draws.params
            return found

        def counted_draft(segments: Sequence[Any], *arguments: Any) -> Any:
            self.num_forwards += 1
            self.looped.append(len(segments))
            return draft(segments, *arguments)

        runner.forward, runner.draft = counted, counted_draft  # type: ignore[method-assign, assignment]

    def open(self, number: int, length: int = 30) -> None:
        sampling, speculation = SPECS[number]
        prompt = tuple(text(length, number))
        spec = DraftSessionSpec(f"s{number}", prompt, len(prompt), sampling, speculation, VOCAB_SIZE)
        self.sinks[spec.session_id] = Sink()
        self.engine.open(spec, self.sinks[spec.session_id])

    def settle(self) -> None:
        """Takes in what was posted, and steps until nothing is left to grow."""
        self.engine.take_posted(0)
        while self.engine.turn(time.perf_counter()) == 0:
            pass

    def commit(self, rng: random.Random) -> None:
        """Commits the drafted tokens of some sessions, or other tokens."""
        for session_id in sorted(self.engine.sessions):
            node, tokens = self.engine.sessions[session_id].session.tree.root, list[int]()
            while node.children and rng.random() < 0.8:
                node = rng.choice(list(node.children.values()))
                tokens.append(node.token_id)
            if rng.random() < 0.7:
                tokens.append(rng.randrange(VOCAB_SIZE))
            if tokens:
                self.engine.commit(session_id, tuple(tokens))

    def messages(self) -> dict[str, list[Draft]]:
        return {session_id: sink.drafts for session_id, sink in self.sinks.items()}


def both(run: Callable[[Stepped], None], **arguments: Any) -> Stepped:
    """Runs the same with and without loops, compares what was sent, and returns the engine with loops."""
    engines = [Stepped(loops=loops, **arguments) for loops in (False, True)]
    for each in engines:
        run(each)
    assert engines[1].messages() == engines[0].messages()
    assert not engines[0].looped
    assert all(each.sinks[f"s{number}"].drafts for each in engines for number in LOOPED if f"s{number}" in each.sinks)
    return engines[1]


@pytest.mark.parametrize("seed", range(2))
def test_sessions_of_all_kinds_send_what_they_send_without_loops(seed: int) -> None:
    def run(stepped: Stepped) -> None:
        rng = random.Random(seed)
        for number in range(len(SPECS)):
            stepped.open(number)
        for _ in range(4):
            stepped.settle()
            stepped.commit(rng)
        stepped.settle()

    stepped = both(run)
    assert len(stepped.looped) > 3
    assert max(stepped.looped) == len(LOOPED)


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_only_chains_whose_every_token_is_the_best_one_are_looped(number: int) -> None:
    def run(stepped: Stepped) -> None:
        stepped.open(number)
        stepped.settle()

    stepped = both(run)
    assert bool(stepped.looped) == (number in LOOPED)
    # Samples of a draft model's own noise are drawn on the host.
    draws_itself = number in DRAWN
    assert all(told == (0 if draws_itself else wanted) for told, wanted in stepped.told)


def test_a_chain_of_five_tokens_takes_two_launches() -> None:
    stepped = Stepped(loops=True)
    stepped.open(0)
    stepped.settle()
    assert (stepped.num_forwards, stepped.looped) == (2, [1])
    assert len(stepped.messages()["s0"][0].token_ids) == 5
    assert stepped.messages()["s0"][0].num_forwards == 5


def test_a_row_that_is_left_to_the_host_is_drawn_by_it() -> None:
    calls = 0

    def sometimes_unsettled(logits: Tensor, rows: Tensor, k: int) -> Tensor:
        nonlocal calls
        calls += 1
        found = best_tokens(logits, rows, k)
        found[0, calls % 3] = UNSETTLED
        return found

    backend = CudaBackend(replace(TWINS, best_tokens=sometimes_unsettled), None)

    def run(stepped: Stepped) -> None:
        for number in LOOPED[:3]:
            stepped.open(number)
        rng = random.Random(1)
        for _ in range(2):
            stepped.settle()
            stepped.commit(rng)
        stepped.settle()

    assert both(run, backend=backend).looped


@pytest.mark.parametrize(("forward_us", "num_steps"), [(1, 1), (10**9, 12)], ids=["fast target", "slow target"])
def test_step_by_step_a_draft_in_turns_ends_as_soon_as_a_step_is_not_worth_it(forward_us: int, num_steps: int) -> None:
    stepped, sink = Stepped(loops=False), Sink()
    params = IN_TURNS_TO_THE_END
    stepped.engine.open(DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE), sink)
    stepped.engine.steer("s", Steering(forward_us=forward_us))
    stepped.settle()
    assert [draft.num_forwards for draft in sink.drafts] == [num_steps]
    stepped.engine.commit("s", (1,))
    stepped.settle()
    assert [draft.num_forwards for draft in sink.drafts] == [num_steps, num_steps]


def test_a_paused_draft_is_nobody_s_reason_to_end() -> None:
    stepped = Stepped(loops=True)
    stepped.open(9)
    stepped.settle()
    session = stepped.engine.sessions["s9"].session
    assert session.awaited_draft() is not None
    stepped.engine.steer("s9", Steering(SpeculationParams(OFF)))
    stepped.settle()
    assert session.awaited_draft() is None


def test_near_the_end_of_the_context_steps_are_made_one_by_one() -> None:
    def run(stepped: Stepped) -> None:
        stepped.open(0, 509)
        stepped.open(2, 200)
        stepped.settle()

    assert set(both(run).looped) == {1}


def test_a_loop_takes_no_room_from_others() -> None:
    def run(stepped: Stepped) -> None:
        # Eight steps of the older one would take the last block, which the younger one needs later.
        stepped.open(0, 59)
        stepped.open(1, 62)
        stepped.settle()

    stepped = both(run, num_blocks=4)
    assert stepped.looped
    assert stepped.engine.residency.num_preemptions == 0
