"""On a GPU a row has the same bits however it is computed, in a graph or without one."""

from __future__ import annotations

import inspect

import pytest
import torch

from outrider.models.loading import LoadedModel, build_hf_model
from outrider.models.runner import Runner, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
LENGTHS = (1, 63, 64, 65, 255, 256, 257, 700)


def test_the_self_test_finds_the_target_exact(target: LoadedModel) -> None:
    assert target.exactness.is_exact, target.exactness.reason


def test_a_text_that_is_read_token_by_token_has_the_logits_of_one_that_is_read_at_once(target: LoadedModel) -> None:
    if not target.exactness.is_exact:
        pytest.skip(f"rows are not exact here: {target.exactness.reason}")
    token_ids = [5 + index * 7 % 2000 for index in range(300)]
    runner, cache = target.runner, target.runner.new_cache()
    at_once = runner.forward([Segment(cache, token_ids, len(token_ids))])
    cache.truncate(0)
    one_by_one = torch.cat([runner.forward([Segment(cache, [token_id], 1)]) for token_id in token_ids])
    cache.clear()
    assert torch.equal(at_once, one_by_one)


def test_replayed_graphs_have_the_bits_of_the_same_kernels_without_them(device: str) -> None:
    if "use_graphs" not in inspect.signature(Runner).parameters:
        pytest.skip("this runner captures no graphs")
    found = []
    for use_graphs in (True, False):
        options = {"use_graphs": use_graphs}
        runner = Runner(build_hf_model("demo/target", "bfloat16", device=device)[0], **options)
        rows = []
        for length in LENGTHS:
            caches = [runner.new_cache() for _ in range(3)]
            for number, cache in enumerate(caches):
                runner.forward([Segment(cache, [1 + (number + index) % 2000 for index in range(length)], 0)])
            # Few rows and many, in turns: a replay must not read what the one before has left.
            for num_rows in (1, 5, 40):
                rows.append(runner.forward([Segment(cache, [7] * num_rows, num_rows) for cache in caches]).clone())
            for cache in caches:
                cache.clear()
        found.append(torch.cat(rows))
    assert torch.equal(*found)
