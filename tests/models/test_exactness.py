"""Rows have the same bits however they are computed. If they do not, the self-test detects it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from outrider.models import exactness
from outrider.models.backend import CPU, TORCH, Backend
from outrider.models.exactness import NotExact, check_rows, make_exact
from outrider.models.runner import Runner, Segment
from outrider.models.torch import attention
from tests.support.tiny_models import VOCAB_SIZE, build, text

LENGTH = 150
TEXT = text(LENGTH)


def a_runner(family: str, dtype: torch.dtype, *, backend: Backend = CPU) -> Runner:
    model = build(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return backend.make_runner(model)


@pytest.fixture(
    scope="module",
    params=[
        ("llama", torch.float32, CPU),
        ("qwen3", torch.bfloat16, CPU),
        ("mistral", torch.bfloat16, CPU),
        ("qwen3", torch.float32, TORCH),
        ("mistral", torch.bfloat16, TORCH),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}-{'kernels' if param[2] is CPU else 'torch'}",
)
def runner(request: pytest.FixtureRequest) -> Runner:
    family, dtype, backend = request.param
    made = a_runner(family, dtype, backend=backend)
    if not make_exact(made, "").is_exact:
        pytest.skip("rows are not exact on this processor")
    return made


@pytest.fixture(scope="module")
def expected(runner: Runner) -> Tensor:
    """The logits of every token of the text, read in one forward."""
    cache = runner.new_cache()
    logits = runner.forward([Segment(cache, TEXT, LENGTH)])
    cache.clear()
    return logits


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_way_through_a_text_gives_the_same_bits(runner: Runner, expected: Tensor, data: st.DataObject) -> None:
    cache, beside = runner.new_cache("a"), runner.new_cache()
    cache.find_prefix(TEXT)  # published by an earlier example
    while cache.length < LENGTH:
        start = cache.length
        size = min(LENGTH - start, data.draw(st.sampled_from([1, 1, 2, 3, 5, 8, 17, 40, 70]), label="rows"))
        segments = [Segment(cache, TEXT[start : start + size], size)]
        if data.draw(st.booleans(), label="beside"):
            others = data.draw(st.integers(1, 9))
            segments.insert(0, Segment(beside, TEXT[:others], 0))
        assert torch.equal(runner.forward(segments), expected[start : start + size])
        if data.draw(st.integers(0, 5), label="preempted") == 0:
            cache.publish(TEXT)
            cache.clear()
            cache.find_prefix(TEXT)
            if cache.length < start + size:
                runner.forward([Segment(cache, TEXT[cache.length : start + size], 0)])
    cache.publish(TEXT)
    cache.clear()
    beside.clear()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), start=st.sampled_from([1, 7, 40, 62, 63, 64, 65, 100, 120, 127, 128, 130]))
def test_a_path_of_any_tree_has_the_bits_of_the_text(
    runner: Runner, expected: Tensor, data: st.DataObject, start: int
) -> None:
    tree = DraftTree(TEXT[:start], VOCAB_SIZE)
    nodes: list[Node] = []
    path = [tree.root]
    for depth in range(data.draw(st.integers(1, min(16, LENGTH - start)), label="depth")):
        wrong = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3), label="beside")
        tokens = data.draw(st.permutations([TEXT[start + depth], *wrong]), label="order")
        parents = [path[-1], *data.draw(st.lists(st.sampled_from([tree.root, *nodes]), max_size=2))]
        for parent in parents:
            added = [tree.add(parent, token_id, -0.1, Source.DRAFT) for token_id in tokens]
            nodes += [node for node in dict.fromkeys(added) if node is not None and node not in nodes]
        path.append(path[-1].children[TEXT[start + depth]])
    nodes.sort(key=lambda node: node.position)
    cache = runner.new_cache()
    if start > 1:
        runner.forward([Segment(cache, TEXT[: start - 1], 0)])
    logits = runner.forward([Segment.of_tree(cache, [TEXT[start - 1]], nodes, num_logits=1 + len(nodes))])
    rows = [0, *(1 + nodes.index(node) for node in path[1:])]
    assert torch.equal(logits[rows], expected[start - 1 : start - 1 + len(rows)])
    # The accepted rows move together, and are read at their new place.
    cache.keep(start, [start + row - 1 for row in rows[1:]])
    after = TEXT[cache.length : cache.length + 2]
    if after:
        first = cache.length
        assert torch.equal(runner.forward([Segment(cache, after, len(after))]), expected[first : first + len(after)])
    cache.clear()


def test_the_self_test_sees_a_product_whose_bits_depend_on_the_number_of_rows() -> None:
    runner = a_runner("llama", torch.float32)
    layers: Any = runner._stack._layers  # type: ignore[attr-defined]
    mlp = layers[0]._mlp

    def by_rows(hidden: Tensor, attended: Tensor) -> Tensor:
        return mlp(hidden, attended) * (1 + 1e-6 * (len(hidden) % 2))  # type: ignore[no-any-return]

    layers[0]._mlp = by_rows
    with pytest.raises(NotExact, match=r"chains of \d+: \d+ of \d+ rows have other bits"):
        check_rows(runner)
    found = make_exact(runner, "")
    assert not found.is_exact
    assert "have other bits" in found.reason


def test_the_self_test_sees_sums_that_go_by_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = a_runner("llama", torch.float32, backend=TORCH)
    runner.min_rows = 4
    # As if a tree were tiled by its slots.
    monkeypatch.setattr(attention.PartGroup, "_make_order", lambda self, num_columns, group: None)
    with pytest.raises(NotExact, match="trees of depth"):
        check_rows(runner)


@pytest.mark.parametrize("name", ["kernels.py", "vectors.py", "bfloat16.py"])
def test_another_version_of_the_arithmetic_has_another_numerics_id(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    runner = a_runner("llama", torch.float32)
    before = exactness.numerics_id(runner, "weights")
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read_text(path) + "# new" * (path.name == name))
    assert exactness.numerics_id(runner, "weights") != before


def test_equal_models_on_one_machine_have_one_numerics_id() -> None:
    ids = {make_exact(a_runner("llama", torch.float32), "weights").numerics_id for _ in range(2)}
    other = make_exact(a_runner("llama", torch.float32), "other weights").numerics_id
    assert len(ids) == 1
    assert other not in ids


@pytest.mark.parametrize("min_rows", [1, 2, 4, 6])
def test_rows_that_fill_up_a_forward_change_nobodys_logits(min_rows: int) -> None:
    runner = a_runner("llama", torch.float32)
    runner.min_rows = 1
    alone = runner.forward([Segment(runner.new_cache(), TEXT[:2], 1)])
    runner.min_rows = min_rows
    for beside in ([], [Segment(runner.new_cache(), TEXT[:1], 0)], [Segment(runner.new_cache(), TEXT[:5], 0)]):
        cache = runner.new_cache()
        runner.forward([Segment(cache, TEXT[:1], 0)])
        found = runner.forward([*beside, Segment(cache, TEXT[1:2], 1)])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_one_thread_and_two_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    runner, before, found = a_runner(family, dtype), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            cache = runner.new_cache()
            pieces = TEXT[:100], TEXT[100:101], TEXT[101:]
            found.append(torch.cat([runner.forward([Segment(cache, piece, len(piece))]) for piece in pieces]))
            cache.clear()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
