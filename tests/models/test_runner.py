"""The packed runner against the library's own logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MistralConfig

from outrider.models.backend import CPU
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.packing import placeholder
from outrider.models.runner import Runner, Segment, context_of
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, build, reference_logits, text, tree_visibility

FAMILIES = list(CONFIGS)
#: Node i hangs on PARENTS[i]; -1 is the trunk.
PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5]
DEPTHS = [0, 0, 1, 1, 1, 2, 2, 3]
#: The path of node 7 through the tree, as rows.
PATH = [0, 2, 5, 7]


@pytest.fixture(scope="module", params=[(f, fuse) for f in FAMILIES for fuse in (True, False)], ids=str)
def family_and_runner(request: pytest.FixtureRequest) -> tuple[str, Runner]:
    family, fuse = request.param
    runner = CPU.make_runner(build(family), fuse=fuse)
    assert runner.is_fused == fuse
    return family, runner


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_one_session_gets_the_reference_logits(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    ids = text(50)
    assert_close(runner.forward([Segment(runner.new_cache(), ids, 50)]), reference_logits(family, ids))


def test_packed_sessions_do_not_see_each_other(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    texts = [text(length, seed) for seed, length in enumerate((37, 5, 80))]
    new_rows = (1, 4, 3)
    caches = [runner.new_cache() for _ in texts]
    runner.forward([Segment(c, ids[:-n], 0) for c, ids, n in zip(caches, texts, new_rows, strict=True)])
    logits = runner.forward([Segment(c, ids[-n:], n) for c, ids, n in zip(caches, texts, new_rows, strict=True)])
    expected = [reference_logits(family, ids)[-n:] for ids, n in zip(texts, new_rows, strict=True)]
    assert_close(logits, torch.cat(expected))


def test_chunked_prefill_equals_one_shot(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    ids = text(60)
    cache = runner.new_cache()
    for start in range(0, 48, 16):
        assert runner.forward([Segment(cache, ids[start : start + 16], 0)]).shape == (0, VOCAB_SIZE)
    assert cache.length == 48
    assert_close(runner.forward([Segment(cache, ids[48:], 2)]), reference_logits(family, ids)[-2:])


def test_going_on_after_a_truncation_equals_never_having_gone_there(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    ids = text(40)
    cache = runner.new_cache()
    runner.forward([Segment(cache, ids[:30], 0)])
    runner.forward([Segment(cache, text(7, seed=9), 7)])
    cache.truncate(30)
    assert_close(runner.forward([Segment(cache, ids[30:], 10)]), reference_logits(family, ids)[30:])


def tree_segment(runner: Runner, trunk: list[int], nodes: list[int]) -> Segment:
    cache = runner.new_cache()
    runner.forward([Segment(cache, trunk, 0)])
    positions = [len(trunk) + depth for depth in DEPTHS]
    return Segment(cache, nodes, len(nodes), positions, tree_visibility(len(trunk), PARENTS))


def test_a_tree_row_equals_its_path_alone(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    trunk, nodes = text(20), text(8, seed=5)
    logits = runner.forward([tree_segment(runner, trunk, nodes)])
    for node in range(8):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        expected = reference_logits(family, trunk + [nodes[n] for n in path])[-1]
        assert_close(logits[node], expected)


def test_a_tree_grows_level_by_level(family_and_runner: tuple[str, Runner]) -> None:
    """What a draft model does: the second level is a separate forward, after the slots of the first."""
    family, runner = family_and_runner
    trunk, nodes = text(20), text(8, seed=5)
    cache = runner.new_cache()
    runner.forward([Segment(cache, trunk, 0)])
    visible = tree_visibility(20, PARENTS)
    runner.forward([Segment(cache, nodes[:2], 2, [20, 20], visible[:2, :22])])
    logits = runner.forward([Segment(cache, nodes[2:5], 3, [21, 21, 21], visible[2:5, :25])])
    expected = [reference_logits(family, [*trunk, nodes[PARENTS[n]], nodes[n]])[-1] for n in (2, 3, 4)]
    assert_close(logits, torch.stack(expected))


def test_keeping_a_path_of_a_tree_equals_the_path_alone(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    trunk, nodes = text(20), text(8, seed=5)
    segment = tree_segment(runner, trunk, nodes)
    runner.forward([segment])
    segment.cache.keep(20, [20 + node for node in PATH])
    assert segment.cache.length == 24
    ids = trunk + [nodes[n] for n in PATH] + text(3, seed=6)
    assert_close(runner.forward([Segment(segment.cache, ids[24:], 3)]), reference_logits(family, ids)[24:])


def test_chains_and_trees_share_a_forward(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    trunk, nodes, ids = text(20), text(8, seed=5), text(33, seed=7)
    cache = runner.new_cache()
    runner.forward([Segment(cache, ids[:32], 0)])
    logits = runner.forward([Segment(cache, ids[32:], 1), tree_segment(runner, trunk, nodes)])
    assert_close(logits[0], reference_logits(family, ids)[-1])
    assert_close(logits[-1], reference_logits(family, trunk + [nodes[n] for n in PATH])[-1])


def test_positions_beyond_the_first_rotary_table_are_right() -> None:
    family = "llama"
    runner = CPU.make_runner(build(family))
    ids = text(12)
    positions = [5000 + i for i in range(12)]
    logits = runner.forward([Segment(runner.new_cache(), ids, 12, positions)])
    # The rotary embedding is relative, so the far text has the near one's logits, except for rounding.
    torch.testing.assert_close(logits, reference_logits(family, ids), rtol=2e-2, atol=2e-2)


def test_rows_go_on_from_tokens_that_the_host_has_not_read(family_and_runner: tuple[str, Runner]) -> None:
    family, runner = family_and_runner
    texts = [text(length, seed) for seed, length in enumerate((9, 14))]
    caches = [runner.new_cache() for _ in texts]
    runner.forward([Segment(cache, ids[:-1], 0) for cache, ids in zip(caches, texts, strict=True)])
    drawn = torch.tensor([texts[1][-1], -1, texts[0][-1]])
    known = runner.new_cache()
    segments = [
        Segment(caches[0], [placeholder(2)], 1),
        Segment(known, texts[0], 1),  # among rows whose tokens the host knows
        Segment(caches[1], [placeholder(0)], 1),
    ]
    logits = runner.forward(segments, drawn=drawn)
    expected = [reference_logits(family, ids)[-1:] for ids in (texts[0], texts[0], texts[1])]
    assert_close(logits, torch.cat(expected))


def test_no_segments_give_no_logits() -> None:
    assert CPU.make_runner(build("llama")).forward([]).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "at least one row"),
        ({"num_logits": 4}, r"num_logits must be in \[0, 3\], got 4"),
        ({"position_ids": [1]}, "position_ids must have 3 entries, got 1"),
        ({"visible": np.ones((3, 2), dtype=np.bool_)}, r"visible must be \(3, 3\), got \(3, 2\)"),
    ],
)
def test_a_malformed_segment_is_refused_and_leaves_no_trace(changes: dict[str, object], message: str) -> None:
    runner = CPU.make_runner(build("llama"))
    cache, good = runner.new_cache(), runner.new_cache()
    arguments: dict[str, object] = {"cache": cache, "token_ids": [1, 2, 3], "num_logits": 1, **changes}
    with pytest.raises(ValueError, match=message):
        runner.forward([Segment(good, [1], 1), Segment(**arguments)])  # type: ignore[arg-type]
    assert (cache.length, good.length) == (0, 0)


def test_two_segments_of_one_cache_are_refused() -> None:
    runner = CPU.make_runner(build("llama"))
    cache = runner.new_cache()
    with pytest.raises(ValueError, match="share a cache"):
        runner.forward([Segment(cache, [1], 1), Segment(cache, [2], 1)])


def test_a_sliding_window_limits_the_context() -> None:
    common = CONFIGS["llama"].to_dict()
    sizes = {k: common[k] for k in ("vocab_size", "hidden_size", "max_position_embeddings")}
    assert context_of(MistralConfig(sliding_window=64, **sizes)) == (
        64,
        "beyond 64 tokens its attention is a sliding window",
    )
    assert context_of(MistralConfig(sliding_window=None, **sizes)) == (512, "")
    # Qwen2 states a window and uses it only if its layers say so.
    assert context_of(CONFIGS["qwen2"]) == (512, "")


def test_attention_with_sinks_is_refused_at_load() -> None:
    from transformers import GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    with pytest.raises(UnsupportedModel, match="s_aux"):
        CPU.make_runner(GptOssForCausalLM(config))


def test_bfloat16_stays_close_to_float32() -> None:
    model = build("qwen3")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    ids = text(50)
    runner = CPU.make_runner(model)
    logits = runner.forward([Segment(runner.new_cache(), ids, 50)])
    expected = reference_logits("qwen3", ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
