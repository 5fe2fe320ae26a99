"""What a round asks of a GPU, counted on tensors without content, for models of usual sizes.

A round launches few kernels, copies once to the device and once from it, and never waits for the device in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from outrider.core.params import SamplingParams, Source
from outrider.core.tree import DraftTree
from outrider.models.acceptance import Round, begin_rounds, draws_of, emitted
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.device_draws import CudaDraws
from outrider.models.cuda.inputs import LOOP_LENS
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import Kernels
from outrider.models.demo.widen import QWEN3_0_6B, QWEN3_8B, Size
from outrider.models.draws import RowDraws
from outrider.models.packing import placeholder
from outrider.models.runner import Segment
from outrider.models.sampling import Sampler, begin_most_probable
from tests.support.tiny_models import text

LAUNCHES_PER_LAYER, FUSED_PER_LAYER, OTHER_LAUNCHES = 9, 6, 12
KERNELS = (
    "add_and_norm",
    "gate_silu",
    "store_heads",
    "attend",
    "move_rows",
    "norm_multiply",
    "norm_gate",
    "multiply_add",
    "multiply",
)
SAMPLED = SamplingParams(seed=1, temperature=0.7, top_p=0.9)
GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 1000


class DeviceCounts(TorchDispatchMode):
    """Counts what a round asks of a device, for which `meta` tensors stand. Copies from them are 0."""

    FREE = frozenset(
        [
            "view",
            "t",
            "split_with_sizes",
            "select",
            "slice",
            "as_strided",
            "detach",
            "empty",
            "empty_like",
            "new_empty",
            "empty_strided",
            "unbind",
            "transpose",
            "permute",
            "unsqueeze",
            "squeeze",
            "expand",
            "alias",
            "resolve_conj",
            "resolve_neg",
        ]
    )
    """Operators that launch nothing: views, and allocations that torch caches."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        """Copies `in` and `out` of the device; and a `list` for each tensor that is made from a list."""
        self.num_waits = 0
        """Copies out that block the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        sources = [leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)]
        named = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        if name in ("to", "_to_copy", "copy_") and sources:
            # Destination and source.
            way = (named or sources)[0], sources[-1]
            if way == ("cpu", "meta"):
                self.copies["out"] += 1
                self.num_waits += not (kwargs or {}).get("non_blocking", False)
                return torch.zeros(args[-1].shape, dtype=args[-1].dtype)
            if way == ("meta", "cpu"):
                self.copies["in"] += 1
        if "meta" in (*sources, *named) and name.removeprefix("_").removeprefix("unsafe_") not in self.FREE:
            self.launches[name] += 1
            # Some operators copy indices to the device by themselves.
            if name not in ("to", "_to_copy", "copy_") and "cpu" in sources:
                self.copies["in"] += 1
        return func(*args, **(kwargs or {}))


class _ListCounts(TorchFunctionMode):
    """Counts tensors on a device that are made from lists, which the dispatcher does not show."""

    def __init__(self, counts: DeviceCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_made = func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and found.is_meta
        is_index = func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta
        indices = args[1] if is_index and isinstance(args[1], tuple) else args[1:2]
        if is_made or (is_index and any(isinstance(index, list) for index in indices)):
            self._counts.copies["list"] += 1
        return found


class Device:
    """A model on a device whose kernels do nothing but count their launches."""

    def __init__(self, size: Size, *, is_exact: bool = True, is_invariant: bool = False) -> None:
        self.counts = DeviceCounts()
        self.products: Counter[tuple[int, torch.dtype]] = Counter()
        """Batch-invariant products, by the dimensions and the type of their outputs."""
        config = Qwen3Config(
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            vocab_size=size.vocab_size,
            tie_word_embeddings=size.is_tied,
            max_position_embeddings=size.max_positions,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        kernels = Kernels(
            check_shape=lambda _group, _head_dim: None,
            **{name: self._kernel(name) for name in KERNELS},
            make_scratch=lambda *_sizes: None,
            best_tokens=self.best_tokens,
            takes_invariant=lambda _weight: is_invariant,
            splits_of=lambda _num_outputs, _num_inputs: 4,
            compiler="none",
        )
        self.early: Counter[tuple[str, int]] = Counter()
        """Launches with `is_early`, which begin while the kernel before them ends, by name and number of inputs."""
        self.num_layers = size.num_layers
        runner = CudaBackend(kernels, None).make_runner(model, num_blocks=400, is_exact=is_exact)
        assert isinstance(runner, CudaRunner)
        self.runner = runner
        self.max_launches = LAUNCHES_PER_LAYER * size.num_layers + OTHER_LAUNCHES

    def _kernel(self, name: str) -> Callable[..., None]:
        def launch(*arguments: Any, is_early: bool = False) -> None:
            self.counts.launches[name] += 1
            if is_early:
                self.early[name, arguments[0].shape[1]] += 1
            if name == "multiply":
                self.products[arguments[-1].dim(), arguments[-1].dtype] += 1

        return launch

    def best_tokens(self, logits: Tensor, rows: Tensor, k: int) -> Tensor:
        assert rows.shape[0] == logits.shape[0]
        self.counts.launches["offer"] += 1
        self.counts.launches["settle"] += 1
        return rows.new_empty(2, len(rows), k)

    def sampler(self) -> Sampler:
        return Sampler(CudaDraws(self.best_tokens, lambda *_: list))

    def counted(self, ask: Callable[[], object]) -> DeviceCounts:
        self.counts.launches.clear()
        self.counts.copies.clear()
        self.counts.num_waits = 0
        self.products.clear()
        with self.counts, _ListCounts(self.counts):
            ask()
        return self.counts

    def sessions(self, num_sessions: int, num_rows: int = 1) -> list[Segment]:
        """Sessions that have read their texts, each with a chain of rows."""
        caches = [self.runner.new_cache() for _ in range(num_sessions)]
        self.runner.forward([Segment(cache, text(CONTEXT, seed), 0) for seed, cache in enumerate(caches)])
        return [Segment(cache, text(num_rows), num_rows) for cache in caches]


@pytest.fixture(scope="module")
def target() -> Device:
    return Device(QWEN3_8B)


@pytest.fixture(scope="module")
def draft() -> Device:
    return Device(QWEN3_0_6B)


def a_round(device: Device, rounds: Sequence[Round]) -> DeviceCounts:
    """Counts a round of a target as its engine runs it."""
    segments = [segment for round_ in rounds for segment in device.sessions(1, len(round_.output_indices))]
    sampler = device.sampler()

    def run() -> None:
        known = draws_of(rounds)
        logits = device.runner.forward(segments, draws=None if known.is_greedy else known)
        emitted(sampler, logits, rounds, known)

    return device.counted(run)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_of_a_target_copies_once_to_its_device_and_once_from_it(target: Device, params: SamplingParams) -> None:
    counts = a_round(target, [Round(params, range(first, first + 4)) for first in (5, 70)])
    assert counts.copies == {"in": 1, "out": 1}
    assert counts.launches.total() <= target.max_launches, counts.launches


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_forward_behind_draws_that_are_not_known_waits_for_nothing(target: Device, params: SamplingParams) -> None:
    segments, sampler = target.sessions(3), target.sampler()
    rounds = [Round(params, [index]) for index in (5, 70, 8)]

    def run() -> None:
        known = draws_of(rounds)
        logits = target.runner.forward(segments, draws=None if known.is_greedy else known)
        pending = begin_rounds(sampler, logits, rounds, known)
        # A session that wants nothing causes no further copy for those that do.
        begin_most_probable(logits, [0.8, None, 0.0], 8)
        assert pending.drawn is not None
        behind = [Segment(segment.cache, [placeholder(place)], 1) for place, segment in enumerate(segments)]
        target.runner.forward(behind, drawn=pending.drawn.on_device)

    counts = target.counted(run)
    assert counts.copies == {"in": 2, "out": 3}
    assert counts.num_waits == 0
    # Drawn tokens replace placeholders; and the copies out.
    names = ("bitwise_not", "clamp_min_", "index_select", "lt", "where", "topk", "_to_copy")
    num_more = sum(counts.launches[name] for name in names) - 2
    assert counts.launches.total() <= 2 * (target.max_launches - 2) + num_more, counts.launches


def test_a_tree_whose_rows_were_accepted_is_moved_without_another_copy(target: Device) -> None:
    tree = DraftTree(text(CONTEXT), target.runner.vocab_size)
    nodes = [node for token_id in (7, 8, 9) if (node := tree.add(tree.root, token_id, -1.0, Source.DRAFT))]
    cache = target.runner.new_cache()
    target.runner.forward([Segment.of_tree(cache, text(CONTEXT), nodes, num_logits=4)])
    cache.keep(CONTEXT, [CONTEXT + 2])
    counts = target.counted(lambda: target.runner.forward([Segment(cache, [3], 1)]))
    assert counts.copies == {"in": 1}
    assert counts.launches["move_rows"] == 1
    assert counts.launches.total() <= target.max_launches, counts.launches


def test_a_round_of_a_draft_model_copies_once_to_its_device_and_once_from_it(draft: Device) -> None:
    segments, sampler = draft.sessions(3), draft.sampler()
    # Unlike those of a target, greedy rows need more than the best token.
    rows = RowDraws([SAMPLED, GREEDY, SAMPLED], [5, 6, 7])

    def run() -> None:
        logits = draft.runner.forward(segments, draws=rows)
        sampler.candidates(logits, rows.params, rows.output_indices, 4, (), rows.on_device)

    counts = draft.counted(run)
    assert counts.copies == {"in": 1, "out": 1}
    assert counts.launches.total() <= draft.max_launches, counts.launches


@pytest.mark.parametrize("length", LOOP_LENS)
def test_a_loop_copies_once_for_all_of_its_steps(draft: Device, length: int) -> None:
    draft.runner.make_loop()
    segments = draft.sessions(3)
    counts = draft.counted(lambda: draft.runner.draft(segments, [SAMPLED] * 3, [5, 6, 7], length))
    assert counts.copies == {"in": 1, "out": 1}
    assert counts.launches.total() <= length * draft.max_launches, counts.launches


def test_a_round_with_batch_invariant_products_launches_as_few_kernels_and_one_for_each_product() -> None:
    target = Device(QWEN3_8B, is_invariant=True)
    assert target.runner.is_invariant
    counts = a_round(target, [Round(GREEDY, range(5, 9))])
    assert counts.copies == {"in": 1, "out": 1}
    assert counts.launches.total() <= target.max_launches, counts.launches
    # The heads and the gate of each layer; the summands of the residual stream, in parts; and the logits.
    assert target.products == {
        (2, torch.bfloat16): 2 * target.num_layers,
        (3, torch.float32): 2 * target.num_layers,
        (2, torch.float32): 1,
    }
    assert counts.launches["mm"] == 0


def test_a_step_with_fused_products_launches_six_kernels_a_layer() -> None:
    draft = Device(QWEN3_0_6B, is_exact=False)
    draft.runner._steps.is_fused = True
    draft.runner.make_loop()
    segments = draft.sessions(3)
    counts = draft.counted(lambda: draft.runner.draft(segments, [SAMPLED] * 3, [5, 6, 7], 4))
    assert counts.launches.total() <= 4 * (FUSED_PER_LAYER * draft.num_layers + OTHER_LAUNCHES), counts.launches
    # The first layer's norm and the last one; the products of the first layer's heads, and the head.
    assert counts.launches["add_and_norm"] == counts.launches["mm"] == 4 * 2
    assert counts.launches["multiply_add"] == 4 * 2 * draft.num_layers
    # Only one of these begins early: the one after attention, whose 16 heads of 128 it reads.
    assert draft.early == {("multiply_add", 16 * 128): 4 * draft.num_layers}


def test_all_logits_of_a_prompt_are_wanted_without_another_copy(target: Device) -> None:
    [*target.runner.exact_ways()]
    segment = Segment(target.runner.new_cache(), text(1500), 1500)
    counts = target.counted(lambda: target.runner.forward([segment]))
    assert counts.copies == {"in": 1}
