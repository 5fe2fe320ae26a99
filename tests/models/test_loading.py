"""From a name to a runner."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.models import loading
from outrider.models.checkpoint import UnknownModel
from outrider.models.demo import names as demo_names
from outrider.models.kv_cache import CacheShape
from outrider.models.loading import CannotLoadModel, build_hf_model, load_for, load_model
from outrider.models.names import is_here, why_no_model
from outrider.models.pool_size import (
    Beside,
    NoMemory,
    NoRoom,
    check_pool_memory,
    check_weights_memory,
    num_blocks,
    room_on_gpu,
)
from outrider.models.runner import Segment
from outrider.models.timing import measure_forward, measure_sessions
from outrider.speculator.settings import SpeculatorSettings
from outrider_bench.workers.forward import main
from tests.support.checkpoints import in_cache
from tests.support.tiny_models import text
from tests.support.word_tokenizer import word_tokenizer


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    return word_tokenizer({word: i for i, word in enumerate(words)})


WORDS = ["end", *(f"w{i}" for i in range(199))]


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft as the demo stores them: in bfloat16, with their tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    for name, hidden in (("target", 64), ("draft", 32)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=211,
            hidden_size=hidden,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=[0, 7],
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer(WORDS).save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def _use_demo_folder(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_names, "DEMO_FOLDER", demo_folder)


def test_a_demo_model_computes_in_float32() -> None:
    loaded = load_model("demo/target")
    assert loaded.runner.dtype == torch.float32
    assert loaded.runner.is_fused


def test_the_services_learn_what_they_must_know(demo_folder: Path) -> None:
    loaded = load_model("demo/target")
    assert loaded.model_id == "demo/target"
    assert loaded.eos_token_ids == (0, 7)
    assert (loaded.vocab_size, loaded.runner.vocab_size) == (200, 211)
    assert loaded.max_context_len == 128
    assert loaded.tokenizer_hash == load_model(str(demo_folder / "draft")).tokenizer_hash


def test_a_folder_loads_in_the_type_it_was_stored_in(demo_folder: Path) -> None:
    bfloat16 = loading._automatic_dtype(torch.bfloat16, "cpu")
    assert load_model(str(demo_folder / "target")).runner.dtype == bfloat16
    assert load_model(str(demo_folder / "target"), dtype="float32").runner.dtype == torch.float32


@pytest.mark.parametrize("model_id", ["demo/target-1m", "demo/draft-c80"])
def test_an_inflated_model_has_the_logits_of_its_base(model_id: str) -> None:
    base_id = model_id.split("-")[0]
    results = []
    for each in (base_id, model_id):
        runner = load_model(each, dtype="float32").runner
        results.append(runner.forward([Segment(runner.new_cache(), text(30), 30)]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_an_untrained_draft_has_the_shape_of_the_draft_and_always_the_same_weights_of_its_own() -> None:
    trained, untrained, again = (
        dict(build_hf_model(model_id)[0].named_parameters())
        for model_id in ("demo/draft", "demo/draft-untrained", "demo/draft-untrained")
    )
    assert [(name, weight.shape) for name, weight in trained.items()] == [
        (name, weight.shape) for name, weight in untrained.items()
    ]
    for name, weight in untrained.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, trained[name]) == ("norm" in name)


@pytest.mark.parametrize("model_id", ["demo/target", "demo/target-1m"])
def test_rotary_frequencies_stay_float32_whatever_the_type(model_id: str) -> None:
    frequencies = [
        build_hf_model(model_id, dtype)[0].base_model.rotary_emb.inv_freq for dtype in ("float32", "bfloat16", "auto")
    ]
    assert all(f.dtype == torch.float32 for f in frequencies)
    assert torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(frequencies[0], frequencies[2])


def test_the_library_model_and_the_runner_have_the_same_weights() -> None:
    model, _ = build_hf_model("demo/target")
    with torch.inference_mode():
        expected = model(torch.tensor([text(20)])).logits[0]
    runner = load_model("demo/target").runner
    logits = runner.forward([Segment(runner.new_cache(), text(20), 20)])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_id", ["demo/other", "demo/target-100", "demo/../secret"])
def test_an_unknown_demo_model_is_refused(model_id: str) -> None:
    with pytest.raises(UnknownModel, match="there is no demo model"):
        load_model(model_id)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnknownModel, match="dtype must be auto or one of float32, bfloat16, float16, got 'int4'"):
        load_model("demo/target", dtype="int4")


def test_the_tokenizer_hash_sees_the_vocabulary_and_not_the_padding() -> None:
    ours, padded, other = tokenizer(WORDS), tokenizer(WORDS), tokenizer([*WORDS[:-1], "other"])
    padded.backend_tokenizer.enable_padding(length=8)
    assert tokenizer_hash(ours) == tokenizer_hash(padded)
    assert tokenizer_hash(ours) != tokenizer_hash(other)


def test_the_bench_measures_every_number_of_rows_and_sessions() -> None:
    runner = load_model("demo/draft").runner
    for measure in (measure_forward, measure_sessions):
        times = measure(runner, [1, 3], 20, num_repeats=3)
        assert list(times) == [1, 3]
        assert all(ms > 0 for ms in times.values())


def test_the_bench_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", "demo/draft", "--rows", "1,2", "--sessions", "1", "--context", "9", "--repeats", "1"]
    threads = str(torch.get_num_threads())
    monkeypatch.setattr("sys.argv", ["bench_forward", *arguments, "--threads", threads])
    main()
    out = capsys.readouterr().out
    assert "demo/draft, torch.float32, cpu" in out
    assert "rows of one session" in out


def test_the_model_of_a_service_that_is_unknown_is_named_with_its_flag() -> None:
    with pytest.raises(CannotLoadModel, match="--model demo/none: there is no demo model"):
        load_for(SpeculatorSettings(model="demo/none", num_threads=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_here_is_named_with_its_flag() -> None:
    with pytest.raises(CannotLoadModel, match="--device cuda:0: no CUDA device here: ") as failed:
        load_for(SpeculatorSettings(model="demo/draft", device="cuda:0"))
    if torch.version.cuda is None:
        assert str(failed.value).endswith("this torch is for CPUs only")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(CannotLoadModel) as failed:
        load_for(SpeculatorSettings(model=name))
    assert str(failed.value) == f"--model {name}: no such folder"


@pytest.fixture
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at an address where nobody listens; its cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.usefixtures("_empty_cache")
def test_a_hub_that_is_away_is_told_at_once() -> None:
    with pytest.raises(CannotLoadModel) as failed:
        load_for(SpeculatorSettings(model="some/model"))
    assert str(failed.value) == (
        "--model some/model: the hub cannot be reached (connection refused); a folder or a demo name works offline"
    )


@pytest.mark.usefixtures("_empty_cache")
def test_a_hub_that_is_switched_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CannotLoadModel, match="cannot be reached \\(it is switched off by HF_HUB_OFFLINE\\)"):
        load_for(SpeculatorSettings(model="some/model"))


@pytest.mark.usefixtures("_empty_cache")
def test_a_model_that_was_fetched_before_needs_no_hub(tmp_path: Path) -> None:
    assert not is_here("some/model")
    in_cache(tmp_path, "some/model", {"config.json": {"model_type": "llama"}})
    assert is_here("some/model")
    assert why_no_model("some/model") == ""


@pytest.mark.usefixtures("_empty_cache")
def test_a_name_without_an_owner_is_not_asked_for() -> None:
    with pytest.raises(
        CannotLoadModel, match="--model smollm2: no such folder and no demo model; a name on the hub has"
    ):
        load_for(SpeculatorSettings(model="smollm2"))


@pytest.mark.usefixtures("_empty_cache")
def test_what_can_be_no_name_on_the_hub_is_none() -> None:
    with pytest.raises(CannotLoadModel, match="--model some model: no such folder, and no name on the hub"):
        load_for(SpeculatorSettings(model="some model"))


def test_a_service_runs_a_forward_on_its_threads() -> None:
    threads_before = torch.get_num_threads()
    try:
        model = load_for(SpeculatorSettings(model="demo/draft", num_threads=2))
        assert torch.get_num_threads() == 2
        assert (model.model_id, model.dtype) == ("demo/draft", "float32")
    finally:
        torch.set_num_threads(threads_before)


def test_a_pool_that_a_gpu_has_no_memory_for_is_refused_with_what_is_missing() -> None:
    shape = CacheShape(num_layers=32, num_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    assert shape.bytes_per_slot == 128 << 10
    room = room_on_gpu(shape, 10 << 30)
    assert room == 69_632
    check_pool_memory(shape, room, room, is_chosen=True)
    with pytest.raises(NoRoom) as chosen:
        check_pool_memory(shape, 77_824, room, is_chosen=True)
    assert str(chosen.value) == (
        "--kv-cache-tokens 77824 tokens take 9.50 GiB of cuda:0, and 1.00 GiB of that are missing: there is room for "
        "69632 tokens"
    )
    with pytest.raises(NoRoom, match="one whole context, 77824 tokens"):
        check_pool_memory(shape, 77_824, room, is_chosen=False)


GIB = 2**30


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU whose memory a test sets: the free bytes, and the bytes that this process has for tensors."""
    memory = {"free": 78 * GIB, "total": 80 * GIB, "reserved": 0}
    monkeypatch.setattr(loading, "check_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (memory["free"], memory["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: memory["reserved"])
    return memory


def test_weights_that_a_gpu_has_no_memory_for_are_refused_with_what_is_missing(gpu_memory: dict[str, int]) -> None:
    model = PreTrainedModel.__new__(PreTrainedModel)
    torch.nn.Module.__init__(model)
    model.weight = torch.nn.Parameter(torch.empty(12 * GIB, dtype=torch.bfloat16, device="meta"))
    model.register_buffer("frequencies", torch.empty(GIB // 4, device="meta"))
    gpu_memory["free"], gpu_memory["total"] = 23 * GIB + GIB // 2, 24 * GIB
    with pytest.raises(NoMemory) as found:
        check_weights_memory(model, "cuda:0")
    assert str(found.value) == (
        "its weights take 25.00 GiB of cuda:0, and 1.50 GiB of that are missing: of its 24.00 GiB, 23.50 GiB are free"
    )
    gpu_memory["free"] = 25 * GIB
    check_weights_memory(model, "cuda:0")


def test_a_model_without_memory_is_named_by_its_flag(gpu_memory: dict[str, int]) -> None:
    gpu_memory["free"] = 1000
    with pytest.raises(CannotLoadModel, match=r"^--model demo/draft: its weights take 0.00 GiB of cuda:1, and 0.00"):
        load_for(SpeculatorSettings(model="demo/draft", device="cuda:1"))


@pytest.mark.parametrize("where", ["build_hf_model", "load_model"])
def test_memory_that_runs_out_while_a_model_is_loaded_is_told_in_one_line(
    where: str, gpu_memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 1.21 GiB "
            "is free. Including non-PyTorch memory, this process has 22.77 GiB memory in use.\nSee documentation"
        )

    monkeypatch.setattr(loading, "build_hf_model", lambda *_, **__: ())
    monkeypatch.setattr(loading, where, fail)
    with pytest.raises(CannotLoadModel) as found:
        load_for(SpeculatorSettings(model="demo/draft", device="cuda:0"))
    assert str(found.value) == (
        "--model demo/draft: cuda:0 has no memory for it: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 23.99 GiB of which 1.21 GiB is free"
    )


@pytest.mark.parametrize(
    ("free", "reserved", "others"),
    [
        (79.0, 0.0, None),  # the CUDA context of this process
        (60.0, 18.8, None),  # the other model of this process
        (60.0, 17.0, 3.0),
        (11.5, 0.0, 68.5),
    ],
)
def test_others_that_hold_memory_of_a_gpu_are_warned_of_with_what_helps(
    free: float, reserved: float, others: float | None, gpu_memory: dict[str, int]
) -> None:
    gpu_memory["free"], gpu_memory["reserved"] = int(free * GIB), int(reserved * GIB)
    shape = CacheShape(num_layers=2, num_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    with structlog.testing.capture_logs() as lines:
        num_blocks(shape, 4096, 0, 64, 4, None)
    assert [(line["event"], line["others_gib"]) for line in lines] == (
        [] if others is None else [("gpu.shared", others)]
    )
    assert all("--drafter in-process" in line["advice"] and "MPS" in line["advice"] for line in lines)


def test_pools_of_two_models_on_a_gpu_have_room_for_as_many_tokens() -> None:
    shape = CacheShape(num_layers=36, num_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    draft_bytes, free_bytes = 112 << 10, 60 << 30
    room = room_on_gpu(shape, free_bytes, Beside(draft_bytes, 0))
    assert room == int(0.85 * free_bytes) // (shape.bytes_per_slot + draft_bytes)
    # By its own rule, the second model has enough room in what the first one leaves.
    left = free_bytes - room * shape.bytes_per_slot
    assert int(0.85 * left) // draft_bytes >= room
    # Room for a number that was set is kept free. A number that was set here is not cut for one that was not.
    assert room_on_gpu(shape, free_bytes, Beside(draft_bytes, 1000)) == room_on_gpu(shape, free_bytes) - 778
    assert room_on_gpu(shape, free_bytes, Beside(draft_bytes, 0), num_chosen=5) == room_on_gpu(shape, free_bytes)


def spoil(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model with changed tensors."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(UP), f"its weights have no {UP}"),
        (
            lambda tensors: tensors.update({UP: torch.zeros(90, 64)}),
            f"{UP} is [90, 64] in its weights, and [96, 64] by",
        ),
        (
            lambda tensors: tensors.update({UP.replace("weight", "bias"): torch.zeros(96)}),
            f"its weights have {UP.replace('weight', 'bias')}, which a model of its type does not use",
        ),
    ],
)
def test_a_checkpoint_whose_tensors_are_not_the_models_is_refused_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], object], reason: str, demo_folder: Path, tmp_path: Path
) -> None:
    folder = spoil(demo_folder / "target", tmp_path / "model", change)
    with pytest.raises(CannotLoadModel) as failed:
        load_for(SpeculatorSettings(model=str(folder), num_threads=1))
    assert str(failed.value).startswith(f"--model {folder}: {reason}")
    assert "\n" not in str(failed.value)


def test_further_tensors_of_no_part_of_the_model_are_told_of_once(demo_folder: Path, tmp_path: Path) -> None:
    folder = spoil(demo_folder / "target", tmp_path / "model", lambda tensors: tensors.update(extra=torch.zeros(3)))
    with structlog.testing.capture_logs() as lines:
        load_model(str(folder))
    assert [line["tensors"] for line in lines if line["event"] == "model.tensors_unused"] == [["extra"]]


def test_pickled_weights_are_loaded_as_weights_alone(demo_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_folder / "target", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    model, _ = build_hf_model(str(tmp_path / "model"))
    expected, _ = build_hf_model(str(demo_folder / "target"))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_whatever_goes_wrong_with_a_models_files_is_one_line(demo_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo_folder / "target", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CannotLoadModel) as failed:
        load_for(SpeculatorSettings(model=str(folder), num_threads=1))
    assert str(failed.value).startswith(f"--model {folder}: ")
    assert "\n" not in str(failed.value)
