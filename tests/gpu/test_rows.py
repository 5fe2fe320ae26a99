"""On a GPU a row has the same bits however it is computed, with or without a graph."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.runner import CudaRunner
from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.widen import QWEN3_8B, randomise
from outrider.models.loading import LoadedModel, build_hf_model, load_model
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
    if not device.startswith("cuda"):
        pytest.skip("graphs are a GPU's")
    pytest.importorskip("triton")
    found = []
    for use_graphs in (True, False):
        backend = CudaBackend.on(torch.device(device), use_graphs=use_graphs)
        runner = backend.make_runner(build_hf_model("demo/target", "bfloat16", device=device)[0])
        rows = []
        for length in LENGTHS:
            caches = [runner.new_cache() for _ in range(3)]
            for number, cache in enumerate(caches):
                runner.forward([Segment(cache, [1 + (number + index) % 2000 for index in range(length)], 0)])
            # Few and many rows, alternately: a replay must not read what the one before has left.
            for num_rows in (1, 5, 40):
                rows.append(runner.forward([Segment(cache, [7] * num_rows, num_rows) for cache in caches]).clone())
            for cache in caches:
                cache.clear()
        found.append(torch.cat(rows))
    assert torch.equal(*found)


# Without graphs hardly anything overlaps, because a host launches more slowly than such kernels run; it must still
# work.
@pytest.mark.parametrize(("is_exact", "use_graphs"), [(True, True), (False, True), (True, False)])
def test_kernels_that_begin_while_others_end_have_the_bits_of_those_that_do_not(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_exact: bool, use_graphs: bool
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("these kernels are a GPU's")
    pytest.importorskip("triton")
    from outrider.models.cuda import attention, few_rows, heads, invariant, layer
    from outrider.models.cuda.overlap import overlaps

    if not overlaps(torch.device(device)):
        pytest.skip("no kernel of this GPU begins while another ends")
    size = dataclasses.replace(QWEN3_8B, num_layers=4, vocab_size=2304)
    randomise(size, DEMO_FOLDER / "target", tmp_path, device=device, dtype=torch.bfloat16)
    backend = CudaBackend.on(torch.device(device), use_graphs=use_graphs)
    found = []
    for can_overlap in (True, False):
        for module in (attention, few_rows, heads, invariant, layer):
            monkeypatch.setattr(module, "overlaps", lambda _device, can_overlap=can_overlap: can_overlap)
        model = build_hf_model(str(tmp_path), "bfloat16", device=device)[0]
        runner = backend.make_runner(model, is_exact=is_exact, num_blocks=64)
        assert isinstance(runner, CudaRunner)
        assert runner._steps.is_fused == (use_graphs and not is_exact)
        caches = [runner.new_cache() for _ in range(3)]
        for number, cache in enumerate(caches):
            runner.forward([Segment(cache, [1 + (number + index) % 2000 for index in range(300)], 0)])
        rows = []
        for num_rows in (1, 5, 40) * 20:
            rows.append(runner.forward([Segment(cache, [7] * num_rows, num_rows) for cache in caches]).clone())
            for cache in caches:
                cache.truncate(300)
        found.append(torch.cat(rows))
    assert torch.equal(*found)


def test_two_models_that_compute_at_the_same_time_have_the_bits_that_each_has_alone(
    device: str, tmp_path: Path
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("streams are those of CUDA")
    # Wide enough that a library sums up its products in memory of its own.
    size = dataclasses.replace(QWEN3_8B, num_layers=2, vocab_size=2304)
    runners = []
    for name in ("one", "other"):
        randomise(size, DEMO_FOLDER / "target", tmp_path / name, device=device, dtype=torch.bfloat16)
        model = load_model(str(tmp_path / name), dtype="bfloat16", device=device, exact="auto", num_tokens=1024)
        runners.append(model.runner)

    def found(runner: Runner, num_times: int) -> torch.Tensor:
        cache, rows = runner.new_cache(), []
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for _ in range(num_times):
                rows.append(runner.forward([Segment(cache, range(5, 17), 12)]).clone())
                cache.truncate(0)
            together = torch.stack(rows).cpu()
        cache.clear()
        return together

    alone = [found(runner, 1) for runner in runners]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda runner: found(runner, 400), runners))
    for rows, expected in zip(together, alone, strict=True):
        assert (rows == expected).all()
