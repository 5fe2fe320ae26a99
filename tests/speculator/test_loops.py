"""Steps that a GPU makes in one go change nothing: the same messages go out as if they were made one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from outrider.core.departure import AwaitedDraft
from outrider.core.methods import BEST_FIRST, CARD, DOUBLE, OFF, PEARL, SPECULATIVE
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import AcceptanceRule, Rows, SamplingParams
from outrider.core.speculation import Method, SpeculationParams, Steering
from outrider.core.tree import Draft
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.rows import UNSETTLED
from outrider.models.draws import RowDraws
from outrider.models.runner import Runner, Segment
from outrider.speculator import engine as engine_module
from outrider.speculator.engine import Engine
from outrider.speculator.session import DraftSessionSpec
from tests.support.cuda_twins import TWIN_GPU, TWINS, best_tokens
from tests.support.services import draft_model
from tests.support.tiny_models import VOCAB_SIZE, build, text

CHAIN = SpeculationParams(SPECULATIVE, num_speculative_tokens=5, lookahead=5)
AHEAD = SpeculationParams(PEARL, num_speculative_tokens=4, lookahead=16, min_path_probability=0.01)
IN_TURNS = SpeculationParams(BEST_FIRST, 12, 12, rows=Rows.TREE, own=(BestFirstParams(serial=True),))
IN_TURNS_TO_THE_END = replace(IN_TURNS, rows=Rows.CHAIN)
"""However improbable the path becomes, it is gone on with while that pays."""
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
    """An engine whose thread has ended: a test takes its steps."""

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
        """For each forward the rows that it was told how to draw from, and those with logits."""
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
            # It has brought what draws depend on with its inputs.
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
        """Commits for some sessions what they have drafted, or other tokens."""
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
    # What a draft model draws by itself is drawn on the host.
    draws_itself = number in DRAWN
    assert all(told == (0 if draws_itself else wanted) for told, wanted in stepped.told)


def test_a_chain_of_five_tokens_takes_two_launches() -> None:
    stepped = Stepped(loops=True)
    stepped.open(0)
    stepped.settle()
    assert (stepped.num_forwards, stepped.looped) == (2, [1])
    assert len(stepped.messages()["s0"][0].token_ids) == 5
    assert stepped.messages()["s0"][0].num_forwards == 5


@pytest.mark.parametrize(("num_speculative_tokens", "told"), [(5, [False]), (9, [True, False])])
def test_a_loop_goes_on_only_with_a_loop(num_speculative_tokens: int, told: list[bool]) -> None:
    stepped, noted = Stepped(loops=True), list[bool]()
    choice = stepped.engine._loop_choice
    choice.observe = lambda *_, goes_on, **__: noted.append(goes_on)  # type: ignore[method-assign]
    params = SpeculationParams(SPECULATIVE, num_speculative_tokens, num_speculative_tokens)
    stepped.engine.open(DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE), Sink())
    stepped.settle()
    # Steps of which there are too few for a loop are made one by one.
    assert noted == told


@pytest.mark.parametrize(
    ("min_path_probability", "most", "length"),
    [(0.9, 8, 4), (0.0, 8, 8), (0.9, 12, 4), (0.0, 12, 12)],
    ids=["8 end early", "8 go on", "12 end early", "12 go on"],
)
def test_loops_are_as_long_as_chains_have_been(min_path_probability: float, most: int, length: int) -> None:
    stepped, chosen = Stepped(loops=True), list[int]()
    choose = stepped.engine._loop_choice.choose

    def noted(lengths: Sequence[int]) -> int:
        length = choose(lengths)
        # What is left of a chain may leave no choice.
        chosen.extend([length] if len(lengths) > 1 else [])
        return length

    stepped.engine._loop_choice.choose = noted  # type: ignore[method-assign]
    params = SpeculationParams(SPECULATIVE, most, most, min_path_probability=min_path_probability)
    spec = DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE)
    stepped.engine.open(spec, Sink())
    for number in range(6):
        stepped.settle()
        stepped.engine.commit("s", (number,))
    # The first ones find out.
    assert set(chosen[3:]) == {length}


@pytest.mark.parametrize(("method", "most"), [(SPECULATIVE, 12), (PEARL, 8)])
def test_a_commit_waits_for_eight_steps_at_most_where_the_target_does_not_wait_for_drafts(
    method: Method, most: int
) -> None:
    stepped, asked = Stepped(loops=True), list[int]()
    stepped.engine._loop_choice.choose = lambda lengths: asked.append(lengths[-1]) or lengths[-1]  # type: ignore
    params = SpeculationParams(method, 12, 24)
    stepped.engine.open(DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE), Sink())
    stepped.settle()
    assert asked[0] == most
    other = PEARL if method is SPECULATIVE else SPECULATIVE
    stepped.engine.steer("s", Steering(replace(params, method=other)))
    stepped.engine.commit("s", (1,))
    asked.clear()
    stepped.settle()
    assert asked[0] == 20 - most


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


@pytest.mark.parametrize(("forward_us", "num_loops"), [(1, 1), (10**9, 3)], ids=["fast target", "slow target"])
def test_a_draft_in_turns_ends_where_another_loop_is_not_worth_the_target_s_time(
    forward_us: int, num_loops: int
) -> None:
    stepped, sink = Stepped(loops=True), Sink()
    stepped.engine._loop_choice.choose = lambda lengths: lengths[0]  # type: ignore[method-assign]
    params = IN_TURNS_TO_THE_END
    stepped.engine.open(DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE), sink)
    stepped.engine.steer("s", Steering(forward_us=forward_us))
    stepped.settle()
    assert len(stepped.looped) == num_loops
    # All that the loops have found goes out as one message, and the next commit is drafted for as the last one.
    (draft,) = sink.drafts
    assert draft.num_forwards == 4 * num_loops <= len(draft.token_ids)
    stepped.engine.commit("s", (1,))
    stepped.settle()
    assert len(stepped.looped) == 2 * num_loops
    assert len(sink.drafts) == 2


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


def test_in_turns_all_go_on_or_none() -> None:
    stepped, sinks = Stepped(loops=True), [Sink(), Sink()]
    stepped.engine._loop_choice.choose = lambda lengths: lengths[0]  # type: ignore[method-assign]
    params = IN_TURNS_TO_THE_END
    for number, (sink, depth) in enumerate(zip(sinks, (4, 12), strict=True)):
        own = replace(params, num_speculative_tokens=depth)
        spec = DraftSessionSpec(f"s{number}", tuple(text(30, number)), 30, SPECS[0][0], own, VOCAB_SIZE)
        stepped.engine.open(spec, sink)
        stepped.engine.steer(spec.session_id, Steering(forward_us=1))
    stepped.settle()
    assert stepped.looped == [2]
    assert [draft.num_forwards for sink in sinks for draft in sink.drafts] == [4, 4]


def test_a_draft_in_turns_goes_on_where_the_target_waits_for_another_one_in_any_case() -> None:
    stepped, sink = Stepped(loops=True), Sink()
    stepped.engine._loop_choice.choose = lambda lengths: lengths[0]  # type: ignore[method-assign]
    params = IN_TURNS_TO_THE_END
    whole = replace(CHAIN, num_speculative_tokens=8, lookahead=8, calibration=False)
    for session_id, own in (("s", params), ("other", whole)):
        spec = DraftSessionSpec(session_id, tuple(text(30, 1)), 30, SPECS[0][0], own, VOCAB_SIZE)
        stepped.engine.open(spec, sink if session_id == "s" else Sink())
        stepped.engine.steer(session_id, Steering(forward_us=1))
    stepped.settle()
    assert stepped.looped[:2] == [1, 1], "the other one wants eight tokens"
    assert [draft.num_forwards > 4 for draft in sink.drafts] == [True]


def test_one_that_goes_step_by_step_ends_no_draft_whose_loop_is_to_come() -> None:
    stepped, sinks = Stepped(loops=True), [Sink(), Sink()]
    stepped.engine._loop_choice.choose = lambda lengths: lengths[0]  # type: ignore[method-assign]
    with_penalty = replace(SPECS[0][0], repetition_penalty=1.2)
    for number, (sink, sampling) in enumerate(zip(sinks, (SPECS[0][0], with_penalty), strict=True)):
        spec = DraftSessionSpec(f"s{number}", tuple(text(30, number)), 30, sampling, IN_TURNS_TO_THE_END, VOCAB_SIZE)
        stepped.engine.open(spec, sink)
        # Worth a step, not a loop.
        stepped.engine.steer(spec.session_id, Steering(forward_us=1))
    stepped.settle()
    assert stepped.looped == [1]
    assert [draft.num_forwards for sink in sinks for draft in sink.drafts] == [4, 1]


@pytest.mark.parametrize(("loops", "num_at_once"), [(True, 4), (False, 1)])
def test_a_draft_in_turns_is_judged_by_the_shortest_loop(*, loops: bool, num_at_once: int) -> None:
    stepped = Stepped(loops=loops)
    stepped.open(9)
    stepped.settle()
    assert stepped.engine.sessions["s9"].session._num_at_once == num_at_once


def test_a_paused_draft_is_nobody_s_reason_to_end() -> None:
    stepped = Stepped(loops=True)
    stepped.open(9)
    stepped.settle()
    session = stepped.engine.sessions["s9"].session
    assert session.awaited_draft() is not None
    stepped.engine.steer("s9", Steering(SpeculationParams(OFF)))
    stepped.settle()
    assert session.awaited_draft() is None


@pytest.mark.parametrize(("going_on", "left_out"), ["01", "10"], ids=["the younger", "the older"])
def test_a_draft_that_the_target_leaves_out_of_its_rounds_waits_for_none(
    monkeypatch: pytest.MonkeyPatch, going_on: str, left_out: str
) -> None:
    noted: list[int] = []

    def goes_on(drafts: Sequence[AwaitedDraft], _forward_us: float) -> bool:
        noted.append(len(drafts))
        return True

    monkeypatch.setattr(engine_module, "is_worth_waiting", goes_on)
    stepped = Stepped(loops=False)

    def open_session(number: int) -> None:
        prompt = tuple(text(30, number))
        spec = DraftSessionSpec(f"s{number}", prompt, 30, SPECS[0][0], IN_TURNS_TO_THE_END, VOCAB_SIZE)
        stepped.engine.open(spec, Sink())

    open_session(0)
    open_session(1)

    def weighed_behind(committing: str) -> int:
        for number in committing:
            stepped.engine.commit(f"s{number}", (1,))
        noted.clear()
        stepped.settle()
        return noted[-1]

    together = ["", "01", "01"]
    assert [weighed_behind(each) for each in together] == [2, 2, 2]
    # A slow reader's session is not verified with the other one; then it is, whichever commits first.
    alone = [weighed_behind(going_on) for _ in range(6)]
    assert (alone[:3], alone[-2:]) == ([2, 2, 2], [1, 1])
    assert [weighed_behind(each) for each in together[1:]] == [2, 2]
    assert weighed_behind(left_out) == 2
    open_session(2)
    assert weighed_behind("") == 3, "its first draft is waited for, too"


def test_the_time_of_a_forward_is_that_of_one_that_reads_no_prompt() -> None:
    stepped = Stepped(loops=False)
    stepped.open(9, 400)
    stepped.engine.take_posted(0)
    stepped.engine.turn(time.perf_counter())
    assert stepped.engine._times.draft_us.value is None
    stepped.settle()
    assert stepped.engine._times.draft_us.value is not None


def test_loops_are_as_long_as_their_steps_are_worth() -> None:
    stepped, noted = Stepped(loops=True), list[tuple[int, int]]()
    choice = stepped.engine._loop_choice
    choose = choice.choose
    choice.choose = lambda lengths: choose(lengths) and lengths[-1]  # type: ignore[method-assign]
    choice.observe = lambda length, *_, num_used, **__: noted.append((length, num_used))  # type: ignore[method-assign]
    params = IN_TURNS_TO_THE_END
    stepped.engine.open(DraftSessionSpec("s", tuple(text(30, 1)), 30, SPECS[0][0], params, VOCAB_SIZE), Sink())
    stepped.engine.steer("s", Steering(forward_us=1))
    stepped.settle()
    # Twelve are there, and taken. Four would have been enough.
    assert noted == [(12, 4)]
    assert stepped.engine.sessions["s"].session.tree.num_nodes >= 12


def test_near_the_end_of_the_context_steps_are_made_one_by_one() -> None:
    def run(stepped: Stepped) -> None:
        stepped.open(0, 509)
        stepped.open(2, 200)
        stepped.settle()

    assert set(both(run).looped) == {1}


def test_a_loop_takes_no_room_from_others() -> None:
    def run(stepped: Stepped) -> None:
        # Eight steps of the older one would need the last block, of which the younger one has need later.
        stepped.open(0, 59)
        stepped.open(1, 62)
        stepped.settle()

    stepped = both(run, num_blocks=4)
    assert stepped.looped
    assert stepped.engine.residency.num_preemptions == 0


OF_ONE_LOOP = replace(IN_TURNS, num_speculative_tokens=4)
SLOW_TARGET = Steering(forward_us=10**9)
"""Another loop is worth its time."""
