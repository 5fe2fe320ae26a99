"""Several steps in one graph give the same tokens and bits as as many single forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.backend import TORCH
from outrider.models.cuda import steps
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.inputs import LOOP_LENS
from outrider.models.cuda.rows import MAX_NUM_BEST, UNSETTLED
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import Kernels
from outrider.models.draws import Best
from outrider.models.runner import KVCache, Runner, Segment
from outrider.models.sampling import Sampler, ranked
from tests.support.cuda_twins import EAGER_TWIN, TWIN_GPU, TWINS, best_tokens, fake_graph, spoil
from tests.support.tiny_models import build, text

PARAMS = [
    SamplingParams(seed=3, temperature=0.7),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(seed=8, temperature=1.2, min_p=0.05),
]
LENGTHS = [5, 254, 66, 128]
"""Tokens before the steps. Some make the steps go on in another block, or another split of attention."""


def a_runner(family: str = "qwen3", backend: CudaBackend = TWIN_GPU, **arguments: Any) -> CudaRunner:
    runner = backend.make_runner(build(family), num_blocks=64, **arguments)
    assert isinstance(runner, CudaRunner)
    runner.make_loop()
    return runner


def openings(runner: Runner, lengths: Sequence[int] = LENGTHS) -> list[Segment]:
    """Sessions that have read all but the last tokens of their texts: two of them, or one."""
    segments = []
    for number, length in enumerate(lengths):
        cache, ids, left = runner.new_cache(), text(length, number), 1 + number % 2
        runner.forward([Segment(cache, ids[:-left], 0)])
        segments.append(Segment(cache, ids[-left:], 1))
    return segments


def one_after_the_other(
    runner: Runner, segments: list[Segment], params: Sequence[SamplingParams], indices: Sequence[int], length: int
) -> list[list[Any]]:
    found: list[list[Any]] = [[] for _ in segments]
    for step in range(length):
        at = [index + step for index in indices]
        candidates = Sampler().candidates(runner.forward(segments), params, at, MAX_NUM_BEST)
        for of_session, of_row in zip(found, candidates, strict=True):
            of_session.append(of_row)
        segments = [
            Segment(segment.cache, [of_row[0].token_id], 1)
            for segment, of_row in zip(segments, candidates, strict=True)
        ]
    return found


def as_candidates(found: list[list[Best | None]], params: Sequence[SamplingParams]) -> list[list[Any]]:
    return [
        [best and ranked(best, MAX_NUM_BEST, is_greedy=p.is_greedy) for best in of_steps]
        for of_steps, p in zip(found, params, strict=True)
    ]


def test_a_loop_with_fused_products_finds_what_as_many_forwards_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FUSED_TYPE", torch.float32)
    runner, indices = a_runner(is_exact=False), [0, 7, 100, 3]
    assert runner._steps.is_fused
    expected = one_after_the_other(runner, openings(runner), PARAMS, indices, 4)
    segments = openings(runner)
    spoil(runner)
    found = as_candidates(runner.draft(segments, PARAMS, indices, 4), PARAMS)
    assert [[[each.token_id for each in of_row] for of_row in of_steps] for of_steps in found] == [
        [[each.token_id for each in of_row] for of_row in of_steps] for of_steps in expected
    ]


@pytest.mark.parametrize("backend", [TWIN_GPU, EAGER_TWIN], ids=["graph", "one kernel after the other"])
@pytest.mark.parametrize("length", LOOP_LENS)
def test_a_loop_finds_what_as_many_forwards_find(backend: CudaBackend, length: int) -> None:
    runner, indices = a_runner(backend=backend), [0, 7, 100, 3]
    expected = one_after_the_other(runner, openings(runner), PARAMS, indices, length)
    segments = openings(runner)
    spoil(runner)
    assert as_candidates(runner.draft(segments, PARAMS, indices, length), PARAMS) == expected


def test_a_chain_goes_on_behind_the_steps_that_were_kept() -> None:
    runner, length = a_runner(), LOOP_LENS[0]
    expected = one_after_the_other(runner, openings(runner), PARAMS, [0] * 4, 2 * length)
    segments, found = openings(runner), []
    for first in (0, length):
        found.append(runner.draft(segments, PARAMS, [first] * 4, length))
        for number, segment in enumerate(segments):
            cache = segment.cache
            assert cache.length == LENGTHS[number] + first
            # As its session does with the tokens that went through the graph.
            cache.append(range(cache.length, cache.length + length - 1))
        last = [of_steps[-1] or ([], []) for of_steps in found[-1]]
        segments = [Segment(segment.cache, [ids[0]], 1) for segment, (ids, _) in zip(segments, last, strict=True)]
    joined = [one + other for one, other in zip(*found, strict=True)]
    assert as_candidates(joined, PARAMS) == expected


def test_what_a_loop_leaves_is_not_seen_by_the_forward_after_it() -> None:
    runner = a_runner()
    (segment,), (other,) = openings(runner, [40]), openings(runner, [40])
    runner.draft([segment], PARAMS[:1], [0], 4)
    runner.forward([other])
    found, expected = (runner.forward([Segment(each.cache, [9], 1)]) for each in (segment, other))
    assert torch.equal(found, expected)


def test_accepted_rows_of_trees_are_moved_before_the_first_step() -> None:
    runner = a_runner()
    found = []
    for loops in (False, True):
        cache = runner.new_cache()
        runner.forward([Segment(cache, text(6), 0)])
        # The second of two siblings stays.
        a_pair = Segment(cache, [7, 8], 0, [6, 6], _sees_one_sibling(cache))
        runner.forward([a_pair])
        cache.keep(6, [7])
        assert runner.pool.moves
        draft: Any = runner.draft if loops else one_after_the_other
        arguments: Any = ([Segment(cache, [3], 1)], PARAMS[:1], [0], 4)
        found.append(draft(*arguments) if loops else draft(runner, *arguments))
    assert not runner.pool.moves
    assert as_candidates(found[1], PARAMS[:1]) == found[0]


def _sees_one_sibling(cache: KVCache) -> Any:
    visible = torch.ones(2, cache.length + 2, dtype=torch.bool)
    visible[0, -1] = visible[1, -2] = False
    return visible.numpy()


def test_more_sessions_than_a_graph_has_rows_for_take_several() -> None:
    runner = a_runner("llama")
    caches = [runner.new_cache() for _ in range(5)]
    segments = [Segment(cache, text(40, number), 1) for number, cache in enumerate(caches)]
    params = [replace(PARAMS[0], seed=number) for number in range(5)]
    found = as_candidates(runner.draft(segments, params, [0] * 5, 4), params)
    for number, p in enumerate(params):
        alone = [Segment(runner.new_cache(), text(40, number), 1)]
        assert found[number : number + 1] == one_after_the_other(runner, alone, [p], [0], 4)


@pytest.mark.parametrize(
    ("num_sessions", "num_rows", "wanted"), [(16, 2, (32, 16)), (17, 2, (64, 32)), (17, 1, (32, 32)), (3, 20, (64, 32))]
)
def test_steps_behind_the_first_one_have_the_rows_that_sessions_need(
    num_sessions: int, num_rows: int, wanted: tuple[int, int]
) -> None:
    computed: list[int] = []

    def gate_silu(gate_up: Tensor, out: Tensor) -> None:
        computed.append(len(out))
        TWINS.gate_silu(gate_up, out)

    runner = a_runner("llama", replace(TWIN_GPU, kernels=replace(TWINS, gate_silu=gate_silu)), is_exact=False)
    params = [replace(PARAMS[number % 4], seed=number) for number in range(num_sessions)]
    found = []
    for loops in (False, True):
        caches = [runner.new_cache() for _ in params]
        runner.forward([Segment(cache, text(9, number), 0) for number, cache in enumerate(caches)])
        segments = [Segment(cache, text(num_rows, number), 1) for number, cache in enumerate(caches)]
        spoil(runner)
        computed.clear()
        arguments = segments, params, [5] * num_sessions, 4
        draft: Any = runner.draft if loops else partial(one_after_the_other, runner)
        found.append(draft(*arguments))
        for cache in caches:
            cache.clear()
    known, loops_found = found[0], as_candidates(found[1], params)
    # Another number of rows gives other last bits of the scores.
    assert [[row[0].token_id for row in steps] for steps in loops_found] == [
        [row[0].token_id for row in steps] for steps in known
    ]
    num_layers = runner.cache_shape.num_layers
    assert computed == [wanted[0]] * num_layers + [wanted[1]] * num_layers * 3


def test_a_row_that_kernels_do_not_settle_is_none_and_leaves_the_others_alone() -> None:
    calls: list[int] = []

    def unsettled_at_third(logits: Tensor, rows: Tensor, k: int) -> Tensor:
        calls.append(len(rows))
        found = best_tokens(logits, rows, k)
        if len(calls) == 3:
            found[0, 1] = UNSETTLED
        return found

    runner = a_runner(backend=CudaBackend(replace(TWINS, best_tokens=unsettled_at_third), None))
    expected = one_after_the_other(runner, openings(runner), PARAMS, [0] * 4, 4)
    found = as_candidates(runner.draft(openings(runner), PARAMS, [0] * 4, 4), PARAMS)
    assert found[1][:2] == expected[1][:2]
    assert found[1][2] is None
    assert [found[0], *found[2:]] == [expected[0], *expected[2:]]


def test_a_loop_that_cannot_be_captured_runs_one_kernel_after_the_other() -> None:
    def fail(compute: Any) -> Any:
        if compute()[0].dtype is torch.int32:  # tokens; a forward returns floats
            raise RuntimeError("operation not permitted when stream is capturing")
        return fake_graph(compute)

    runner = a_runner(backend=CudaBackend(TWINS, lambda: fail))
    expected = one_after_the_other(runner, openings(runner), PARAMS, [0] * 4, 4)
    assert runner.graphs == "one-shape"
    assert as_candidates(runner.draft(openings(runner), PARAMS, [0] * 4, 4), PARAMS) == expected


def test_a_segment_that_begins_no_chain_of_steps_is_refused() -> None:
    runner = a_runner("llama")
    cache = runner.new_cache()
    for segment, rule in [
        (Segment(cache, text(200), 1), "at most 128 rows, got 200"),
        (Segment(cache, [1, 2], 1, [0, 0], torch.eye(2, dtype=torch.bool).numpy()), "in a chain alone"),
    ]:
        with pytest.raises(ValueError, match=rule):
            runner.draft([segment], PARAMS[:1], [0], 4)
        assert cache.length == 0


def test_only_a_runner_with_a_loop_has_steps() -> None:
    with_loop, without = a_runner("llama"), TORCH.make_runner(build("llama"))
    without.make_loop()
    assert [with_loop.loop_lens(length) for length in (0, 2, 3, 5, 6, 8, 9)] == [
        [],
        [],
        [4],
        [4],
        [4, 8],
        [4, 8],
        [4, 8, 12],
    ], "at most a quarter is in vain"
    assert without.loop_lens(99) == []


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:invalid value")  # lanes that are not stored
def test_the_kernels_themselves_find_what_as_many_forwards_find() -> None:
    pytest.importorskip("triton")
    runner = a_runner(backend=CudaBackend(Kernels.load(), None), is_exact=False)
    lengths = [5, 63]
    expected = one_after_the_other(runner, openings(runner, lengths), PARAMS[:2], [0, 7], 4)
    drafted = runner.draft(openings(runner, lengths), PARAMS[:2], [0, 7], 4)
    assert as_candidates(drafted, PARAMS[:2]) == expected
