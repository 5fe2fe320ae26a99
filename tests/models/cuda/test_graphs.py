"""Forwards of fixed shapes, and from graphs, give the same logits as any other runner, whatever runs next to what."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Olmo2Config

from outrider.core.params import SamplingParams, Source
from outrider.core.tree import DraftTree
from outrider.models.backend import TORCH
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.cuda import steps
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.graphs import INVARIANT_BUCKETS, Capture, Results
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import Kernels
from outrider.models.draws import RowDraws
from outrider.models.exactness import NotExact, check_rows, make_exact
from outrider.models.kv_cache import KVCache
from outrider.models.packing import placeholder
from outrider.models.reference import Reference
from outrider.models.runner import Runner, Segment
from outrider.models.sampling import Sampler
from tests.support.cuda_twins import EAGER_TWIN, TWIN_GPU, TWINS, best_tokens, fake_graph, spoil
from tests.support.tiny_models import VOCAB_SIZE, build, reference_logits, text


def a_runner(family: str, backend: CudaBackend = TWIN_GPU, **arguments: Any) -> CudaRunner:
    runner = backend.make_runner(build(family), num_blocks=64, **arguments)
    assert isinstance(runner, CudaRunner)
    return runner


def invariant_twin(capture: Capture | None = None, **kernels: Any) -> CudaBackend:
    """Returns a GPU whose batch-invariant products accept float32: rounding of bfloat16 would hide mistakes."""
    return replace(
        EAGER_TWIN,
        kernels=replace(TWINS, takes_invariant=lambda _weight: True, **kernels),
        make_capture=None if capture is None else lambda: capture,
    )


@pytest.fixture(scope="module", params=["llama", "qwen3", "fused llama", "fused qwen3", "invariant qwen3"])
def runners(request: pytest.FixtureRequest) -> tuple[CudaRunner, Runner]:
    """One that replays graphs of many sizes, and one that runs as on any device."""
    *kinds, family = request.param.split()
    if kinds == ["invariant"]:
        runner = a_runner(family, invariant_twin(fake_graph))
        assert runner.is_invariant
        return runner, TORCH.make_runner(build(family), num_blocks=64)
    # Rounding of bfloat16 would hide mistakes.
    with pytest.MonkeyPatch.context() as patch:
        if kinds:
            patch.setattr(steps, "FUSED_TYPE", torch.float32)
        runner = a_runner(family, is_exact=False)
    assert runner._steps.is_fused == bool(kinds)
    return runner, TORCH.make_runner(build(family), num_blocks=64)


def a_forward(rng: random.Random, runner: Runner, cache: KVCache, token_ids: list[int]) -> tuple[Segment, list[int]]:
    """Rows that follow a text: pieces of a prompt, chains, or trees; and of a tree, which rows are kept."""
    kind = rng.choice(["chain", "tree", "prompt"])
    if kind != "tree":
        rows = text(rng.randint(1, 5) if kind == "chain" else rng.randint(20, 90), rng.randrange(99))
        return Segment(cache, rows, rng.randint(0, min(4, len(rows)))), [-1] * len(rows)
    root = rng.randrange(VOCAB_SIZE)
    tree = DraftTree([*token_ids, root], VOCAB_SIZE)
    nodes = [tree.root]
    for _ in range(rng.randint(1, 9)):
        node = tree.add(rng.choice(nodes), rng.randrange(VOCAB_SIZE), -rng.random(), Source.DRAFT)
        nodes += [node] if node is not None and node not in nodes else []
    chosen = nodes[1:]
    kept, node = [], rng.choice(chosen)
    while node is not tree.root:
        kept.insert(0, chosen.index(node))
        assert node.parent is not None
        node = node.parent
    return Segment.of_tree(cache, [root], chosen, num_logits=1 + len(chosen)), kept


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), num_sessions=st.integers(1, 4))
def test_random_forests_have_the_logits_of_any_other_runner(
    runners: tuple[CudaRunner, Runner], seed: int, num_sessions: int
) -> None:
    found = []
    for runner in runners:
        rng = random.Random(seed)
        caches = [runner.new_cache() for _ in range(num_sessions)]
        texts: list[list[int]] = [[] for _ in caches]
        logits = []
        for _ in range(4):
            chosen = rng.sample(range(num_sessions), rng.randint(1, num_sessions))
            made = [a_forward(rng, runner, caches[i], texts[i]) for i in chosen]
            if runner is runners[0]:
                spoil(runner)
            logits.append(runner.forward([segment for segment, _ in made]))
            for i, (segment, kept) in zip(chosen, made, strict=True):
                start = len(texts[i])
                if kept and kept[0] < 0:
                    texts[i] += segment.token_ids
                    continue
                texts[i] += [segment.token_ids[0], *(segment.token_ids[1 + row] for row in kept)]
                caches[i].keep(start + 1, [start + 1 + row for row in kept])
        for cache in caches:
            cache.clear()
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_more_rows_than_a_forward_has_are_run_in_several() -> None:
    runner, other = a_runner("qwen3"), TORCH.make_runner(build("qwen3"))
    ids = text(300)
    found, expected = (each.forward([Segment(each.new_cache(), ids, 200)]) for each in (runner, other))
    assert runner.graphs == "one-shape"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_more_wanted_rows_than_a_graph_has_room_for_get_their_logits() -> None:
    runner, other = a_runner("qwen2", is_exact=False), TORCH.make_runner(build("qwen2"))
    ids = text(400)
    found, expected = (each.forward([Segment(each.new_cache(), ids, 400)]) for each in (runner, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [TWIN_GPU, EAGER_TWIN])
def test_pieces_of_prompts_have_no_use_for_the_head(backend: CudaBackend) -> None:
    runner, other = a_runner("llama", backend), TORCH.make_runner(build("llama"))
    forwards = runner._forwards
    head, rows_of_heads = forwards._head, []

    def counted(hidden: Tensor) -> Tensor:
        rows_of_heads.append(len(hidden))
        return head(hidden)

    forwards._head = counted
    caches = runner.new_cache(), other.new_cache()
    assert runner.forward([Segment(caches[0], text(200), 0)]).shape == (0, VOCAB_SIZE)
    assert rows_of_heads == []
    other.forward([Segment(caches[1], text(200), 0)])
    found, expected = (
        each.forward([Segment(cache, text(200), 1)]) for each, cache in zip((runner, other), caches, strict=True)
    )
    # It takes two forwards, and only the second one wants logits.
    assert rows_of_heads == [128]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [3, 200], ids=["one forward", "several forwards"])
def test_rows_are_drawn_from_as_a_forward_has_brought_it(num_rows: int) -> None:
    runner = a_runner("llama")
    spoil(runner)
    params = [SamplingParams(seed=1, temperature=0.7, top_p=0.9), SamplingParams(temperature=0.0), SamplingParams()]
    draws = RowDraws([params[row % 3] for row in range(num_rows)], range(40, 40 + num_rows))
    logits = runner.forward([Segment(runner.new_cache(), text(num_rows), num_rows)], draws=draws)
    assert draws.on_device is not None
    found = best_tokens(logits, draws.on_device, 1)[0, :, 0].tolist()
    assert found == Sampler().draw(logits, draws.params, draws.output_indices)


@pytest.mark.parametrize("num_sessions", [3, 40], ids=["one forward", "several forwards"])
def test_rows_go_on_from_tokens_where_they_were_drawn(num_sessions: int) -> None:
    runner, other = a_runner("llama"), TORCH.make_runner(build("llama"))
    num_rows = 4 * num_sessions
    token_ids = torch.tensor(text(num_rows), dtype=torch.int32)
    places = torch.tensor([(7 * number + 1) % num_rows for number in range(num_rows)])
    drawn = torch.full((num_rows,), -1, dtype=torch.int32).index_copy(0, places, token_ids)
    found, expected = (
        each.forward([Segment(each.new_cache(), row, 4) for row in rows.view(-1, 4).tolist()], drawn=of_rows)
        for each, rows, of_rows in ((runner, ~places, drawn), (other, token_ids, None))  # as `placeholder` encodes them
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_token_that_was_not_drawn_makes_some_row_and_spoils_no_other() -> None:
    runner = a_runner("llama")
    drawn = torch.tensor([-1, 7])
    found = runner.forward([Segment(runner.new_cache(), [placeholder(place)], 1) for place in (0, 1)], drawn=drawn)
    assert found.isfinite().all()
    assert torch.equal(found[1:], runner.forward([Segment(runner.new_cache(), [7], 1)]))


def test_more_draws_than_there_is_room_for_are_left_to_who_draws() -> None:
    runner = a_runner("llama", is_exact=False)
    draws = RowDraws([SamplingParams()] * 300, range(300))
    runner.forward([Segment(runner.new_cache(), text(300), 300)], draws=draws)
    assert draws.on_device is None


def of_shape(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies as libraries do: the order of sums depends on the number of rows."""
    half = weight.shape[1] // 2
    if len(x) <= 16:
        return x @ weight.t()
    return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()


@pytest.fixture
def _fuses_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding of bfloat16 would hide mistakes."""
    monkeypatch.setattr(steps, "FUSED_TYPE", torch.float32)


def logits_of_few(runner: Runner) -> Tensor:
    return runner.forward([Segment(runner.new_cache(), text(12), 12)])


@pytest.mark.usefixtures("_fuses_float32")
def test_products_of_few_rows_are_fused() -> None:
    launched: list[int] = []

    def multiply_add(x: Tensor, *arguments: Any, is_early: bool) -> None:
        launched.append(len(x))
        TWINS.multiply_add(x, *arguments, is_early=is_early)

    backend = CudaBackend(replace(TWINS, multiply_add=multiply_add), lambda: fake_graph)
    runner = a_runner("llama", backend, is_exact=False)
    launched.clear()
    torch.testing.assert_close(logits_of_few(runner), reference_logits("llama", text(12)), rtol=1e-4, atol=1e-4)
    # Two in each of three layers.
    assert launched == [16] * 6
    # The blocks that it was tried with are free again.
    assert runner.pool.blocks.num_free == runner.pool.blocks.num_blocks - 1


@pytest.mark.usefixtures("_fuses_float32")
@pytest.mark.parametrize("fails", [True, False])
def test_fused_products_that_are_wrong_or_fail_are_done_without_and_told_of(*, fails: bool) -> None:
    def norm_gate(hidden: Tensor, *arguments: Any) -> None:
        if fails:
            raise ValueError("no such instruction\nmore")
        TWINS.norm_gate(hidden, *arguments)
        # Of a single row.
        arguments[-1][3].mul_(1.5)

    with structlog.testing.capture_logs() as lines:
        runner = a_runner("llama", replace(TWIN_GPU, kernels=replace(TWINS, norm_gate=norm_gate)), is_exact=False)
    [told] = [line["reason"] for line in lines if line["event"] == "products.not_fused"]
    assert told.startswith("no such instruction" if fails else "results of a row differ by ")
    assert (runner.graphs, runner._steps.is_fused) == ("buckets", False)
    torch.testing.assert_close(logits_of_few(runner), reference_logits("llama", text(12)), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_fuses_float32")
def test_products_are_never_fused_where_rows_are_exact_or_were_to_be() -> None:
    runner = a_runner("llama")
    assert not runner._steps.can_fuse
    [*runner.exact_ways()]
    assert runner.graphs == "buckets"
    assert not runner._steps.is_fused


def test_products_of_other_types_are_not_fused() -> None:
    assert not a_runner("llama", is_exact=False)._steps.can_fuse


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("backend", [invariant_twin(), invariant_twin(fake_graph)])
def test_batch_invariant_products_compute_what_others_do(family: str, backend: CudaBackend) -> None:
    runner = a_runner(family, backend)
    assert runner.is_invariant
    assert runner.buckets == INVARIANT_BUCKETS
    for length in (1, 12, 100, 300):
        found = runner.forward([Segment(runner.new_cache(), text(length), length)])
        torch.testing.assert_close(found, reference_logits(family, text(length)), rtol=1e-4, atol=1e-4)


def test_rows_are_exact_in_forwards_of_any_size_where_products_are_batch_invariant() -> None:
    runner = a_runner("llama", invariant_twin())
    assert make_exact(runner, "").is_exact
    assert (runner.is_invariant, runner.has_one_shape) == (True, False)


def test_forwards_of_one_shape_are_tried_where_batch_invariant_products_are_not_exact() -> None:
    rows: list[int] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        rows.append(len(x))
        TWINS.multiply(x, weight, bias, out)
        out.mul_(1 + 1e-6 * len(x))

    runner = a_runner("llama", invariant_twin(multiply=multiply))
    other = a_runner("llama", EAGER_TWIN)
    with structlog.testing.capture_logs() as lines:
        found, known = make_exact(runner, ""), make_exact(other, "")
    assert [line["event"] for line in lines] == ["model.not_exact_yet", "model.exact", "model.exact"]
    assert found == known
    assert (runner.is_invariant, runner.has_one_shape, runner.buckets) == (False, True, (128,))
    rows.clear()
    torch.testing.assert_close(logits_of_few(runner), reference_logits("llama", text(12)), rtol=1e-4, atol=1e-4)
    assert rows == [], "a library multiplies from here on"
    # Its bits differ from those of a replica that has not given up.
    assert known != make_exact(a_runner("llama", invariant_twin()), "")


@pytest.mark.parametrize("num_rows", [33, 129, 257])
def test_the_self_test_runs_forwards_of_all_sizes(num_rows: int) -> None:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        TWINS.multiply(x, weight, bias, out)
        if len(x) >= num_rows:
            out.mul_(1.01)

    runner = a_runner("llama", invariant_twin(multiply=multiply))
    assert make_exact(runner, "").is_exact
    assert (runner.is_invariant, runner.has_one_shape) == (False, True)


def test_the_self_test_leaves_out_forwards_that_a_pool_has_no_room_for() -> None:
    runner = EAGER_TWIN.make_runner(build("llama"), num_blocks=8, is_exact=False)
    check_rows(runner)
    assert runner.pool.blocks.num_free == 8


def test_logits_are_compared_with_those_of_the_library() -> None:
    for factor in (1.0, 1.25):
        model = build("llama")
        reference = Reference(model)
        model.get_output_embeddings().weight.data *= factor  # type: ignore[no-untyped-call]
        runner = EAGER_TWIN.make_runner(model, num_blocks=8, is_exact=False)
        with nullcontext() if factor == 1 else pytest.raises(UnsupportedModel, match="not those of the library's own"):
            reference.check(runner)


@pytest.mark.parametrize("capture", [None, fake_graph])
def test_batch_invariant_products_that_fail_are_done_without_and_told_of(capture: Capture | None) -> None:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if len(x) == 64:
            raise ValueError("out of resource: shared memory\nmore")
        TWINS.multiply(x, weight, bias, out)

    with structlog.testing.capture_logs() as lines:
        runner = a_runner("llama", invariant_twin(capture, multiply=multiply))
    told = [line["reason"] for line in lines if line["event"] == "products.not_invariant"]
    assert told == ["out of resource: shared memory"]
    assert (runner.is_invariant, runner.has_one_shape) == (False, True)
    torch.testing.assert_close(logits_of_few(runner), reference_logits("llama", text(12)), rtol=1e-4, atol=1e-4)


def test_a_model_with_one_matrix_that_has_no_batch_invariant_product_has_none() -> None:
    head = build("llama").get_output_embeddings().weight.shape  # type: ignore[no-untyped-call]
    kernels = replace(TWINS, takes_invariant=lambda weight: weight.shape != head)
    runner = a_runner("llama", replace(EAGER_TWIN, kernels=kernels))
    assert (runner.is_invariant, runner.has_one_shape) == (False, True)
    torch.testing.assert_close(logits_of_few(runner), reference_logits("llama", text(12)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_exact", [False, True])
def test_rows_of_one_shape_are_exact_where_those_of_many_are_not(*, is_exact: bool) -> None:
    runner = a_runner("llama", EAGER_TWIN, is_exact=is_exact)
    head = build("llama").get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    runner._forwards._head = partial(of_shape, weight=head)
    with nullcontext() if is_exact else pytest.raises(NotExact):
        check_rows(runner)
    assert make_exact(runner, "").is_exact == is_exact


def test_a_runner_that_is_not_exact_goes_on_with_forwards_of_many_sizes() -> None:
    def attend(queries: Tensor, *arguments: Any) -> None:
        TWINS.attend(queries, *arguments)
        out = arguments[4]
        # Depends on other rows, which is exactly what is forbidden.
        out.add_(out[:, 0].abs().max() * 1e-3)

    runner = a_runner("llama", CudaBackend(replace(TWINS, attend=attend), lambda: fake_graph))
    assert runner.graphs == "one-shape"
    assert not make_exact(runner, "").is_exact
    assert runner.graphs == "buckets"
    assert runner.forward([Segment(runner.new_cache(), [1, 2], 2)]).shape == (2, VOCAB_SIZE)


def test_the_size_of_the_pool_is_asked_for_when_a_forward_has_run() -> None:
    rows: list[int] = []

    def attend(queries: Tensor, *arguments: Any) -> None:
        rows.append(len(queries))
        TWINS.attend(queries, *arguments)

    def size() -> int:
        assert max(rows) == 2048
        return 7

    backend = CudaBackend(replace(TWINS, attend=attend), lambda: fake_graph)
    runner = backend.make_runner(build("llama"), is_exact=False, num_blocks=size)
    assert runner.pool.blocks.num_blocks == 7
    assert runner.pool.num_slots == runner.pool.data.shape[3] - 1
    assert runner.forward([Segment(runner.new_cache(), [1, 2], 1)]).shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize("num_captured", [0, 3])
def test_graphs_that_cannot_be_captured_are_done_without_and_told_of_once(num_captured: int) -> None:
    tried: list[object] = []

    def capture(compute: Callable[[], Results]) -> Callable[[], Results]:
        tried.append(compute)
        if len(tried) > num_captured:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return fake_graph(compute)

    with structlog.testing.capture_logs() as lines:
        runner = CudaBackend(TWINS, lambda: capture).make_runner(build("llama"), is_exact=False, num_blocks=8)
        runner.make_loop()
    [line] = [line for line in lines if line["event"] != "graphs.captured"]
    assert (line["event"], line["error"]) == ("graphs.not_captured", "operation not permitted when stream is capturing")
    assert "one by one" in line["advice"]
    assert (runner.graphs, len(tried)) == ("eager", num_captured + 1)
    ids = text(20)
    found = runner.forward([Segment(runner.new_cache(), ids, 20)])
    torch.testing.assert_close(found, reference_logits("llama", ids), rtol=1e-4, atol=1e-4)
    # Several steps of a chain, too, are run kernel by kernel.
    assert runner.draft([Segment(runner.new_cache(), ids, 1)], [SamplingParams()], [0], 4)[0][0] is not None


def test_a_model_of_an_unknown_type_runs_as_the_library_has_it_and_without_graphs() -> None:
    torch.manual_seed(2)
    config = Olmo2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    ids = text(20)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    with structlog.testing.capture_logs() as lines:
        runner = TWIN_GPU.make_runner(model, num_blocks=8)
        runner.make_loop()
    assert [(line["event"], line["reason"]) for line in lines] == [
        ("kernels.not_used", "layers of a model of type olmo2 run as they are")
    ]
    assert (runner.graphs, runner.buckets, runner.has_loop) == ("none", (), False)
    torch.testing.assert_close(runner.forward([Segment(runner.new_cache(), ids, 20)]), expected, rtol=1e-4, atol=1e-4)


def test_a_block_is_copied_after_the_rows_on_their_way_to_it(runners: tuple[CudaRunner, Runner]) -> None:
    runner = runners[0]
    one, other = runner.new_cache(), runner.new_cache()
    tree = DraftTree([1, 2, 3], VOCAB_SIZE)
    nodes = [tree.add(tree.root, token_id, -1.0, Source.DRAFT) for token_id in (7, 8, 9)]
    siblings = [node for node in nodes if node is not None]
    runner.forward([Segment.of_tree(one, [1, 2, 3], siblings, num_logits=0)])
    expected = runner.pool.data[:, :, :, one.places(np.array([5]))].clone()
    one.keep(3, [5])
    assert runner.pool.moves
    other.join(one, 4)
    other.reserve(5)
    assert not runner.pool.moves
    assert torch.equal(runner.pool.data[:, :, :, other.places(np.array([3]))], expected)


@pytest.mark.interpret
@pytest.mark.usefixtures("_fuses_float32")
@pytest.mark.filterwarnings("ignore:invalid value")  # lanes that are not stored
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "apart"])
def test_the_kernels_themselves_give_the_logits_of_any_other_runner(*, is_fused: bool) -> None:
    pytest.importorskip("triton")
    runner, other = (
        a_runner("qwen3", CudaBackend(Kernels.load(), None), is_exact=False),
        TORCH.make_runner(build("qwen3")),
    )
    runner._steps.is_fused = is_fused
    ids = text(70)
    found = []
    for each in (runner, other):
        cache = each.new_cache()
        logits = [each.forward([Segment(cache, ids, 1)])]
        tree = DraftTree([*ids, 5], VOCAB_SIZE)
        nodes = [tree.add(tree.root, token_id, -1.0, Source.DRAFT) for token_id in (7, 8)]
        nodes += [tree.add(node, 9, -2.0, Source.DRAFT) for node in nodes if node is not None]
        tree_nodes = [node for node in nodes if node is not None]
        logits.append(each.forward([Segment.of_tree(cache, [5], tree_nodes, num_logits=5)]))
        # The second child and its child stay.
        cache.keep(71, [72, 74])
        logits.append(each.forward([Segment(cache, [3], 1), Segment(each.new_cache(), [1, 2], 2)]))
        found.append(torch.cat(logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
