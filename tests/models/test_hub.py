"""Downloads from a hub: the config is judged first, and only the files that loading reads are downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from outrider.models.hub import FAILED, NO_SUCH_MODEL, OCCUPIED, STATUSES, progress_line
from outrider.models.loading import build_hf_model, load_model
from tests.support import tiny_models
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import Hub, running_hub

pytestmark = pytest.mark.slow

MODEL = "somebody/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
NOT_NEEDED = {
    "README.md": b"# Tiny",
    ".gitattributes": b"* text",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the same weights again",
    "modeling_tiny.py": b"raise SystemExit",
    "original/params.json": b"{}",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model as a repository holds it, and other files that lie in repositories."""
    folder = tmp_path_factory.mktemp("repository")
    tiny_models.build("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(tiny_models.VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()} | NOT_NEEDED


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub(Hub(MODEL, COMMIT, dict(files))) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the model is to be stored."""
    return tmp_path / "models" / "target"


def start(hub: Hub, home: Path, *arguments: str, name: str = MODEL, **env: str) -> subprocess.Popen[str]:
    """Starts the program with a home directory of its own."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.models.hub", name, *arguments],
        env=bare | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HOME": str(home)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def cache(hub: Hub, home: Path, *arguments: str, name: str = MODEL, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, which puts the model into the cache."""
    return ended(start(hub, home, *arguments, name=name, **env))


def fetch(hub: Hub, folder: Path, revision: str = COMMIT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, which puts the model into a folder."""
    return cache(hub, folder.parent.parent / "home", "--revision", revision, "--to", str(folder), **env)


def complaint(process: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line that reports the error."""
    assert process.returncode == status, process.stderr
    assert "Traceback" not in process.stderr
    line = process.stderr.strip().splitlines()[-1]
    assert line.startswith(f"error: {MODEL}: ")
    return line


def test_a_model_is_fetched_into_a_folder_and_runs(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    done = fetch(hub, folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == files.keys() - NOT_NEEDED.keys() | {"OUTRIDER_MODEL"}
    assert not NOT_NEEDED.keys() & set(hub.downloads)
    ids = tiny_models.text(12)
    with torch.inference_mode():
        logits = build_hf_model(str(folder))[0](torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, tiny_models.reference_logits("llama", ids))
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE
    assert fetch(hub, folder, HF_ENDPOINT="http://127.0.0.1:9").returncode == 0


def test_a_download_into_the_cache_says_how_far_it_is_and_a_second_start_says_nothing(
    hub: Hub, tmp_path: Path, files: dict[str, bytes]
) -> None:
    done = cache(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(f"downloading {MODEL}: 0 B of ")
    assert last.split(": ")[1].split(", ")[0].split(" of ") == [first.split(" of ")[1]] * 2
    assert sorted(hub.downloads) == sorted(files.keys() - NOT_NEEDED.keys())
    again = cache(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, "")
    offline = cache(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, "")


def test_a_model_in_several_files_is_fetched(hub: Hub, folder: Path, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    parts = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    lacking = min(name for name in parts if name.endswith(".safetensors"))
    del hub.files[WEIGHTS]
    hub.files |= {name: content for name, content in parts.items() if name != lacking}
    assert lacking in complaint(fetch(hub, folder), NO_SUCH_MODEL)
    assert not folder.exists()
    hub.commit = "f" * 40
    hub.files |= parts
    assert fetch(hub, folder, "f" * 40).returncode == 0
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE


def test_of_a_model_that_cannot_be_served_the_configs_alone_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}'
    assert "is quantised (awq)" in complaint(cache(hub, tmp_path), NO_SUCH_MODEL)
    assert all(name.endswith("config.json") for name in hub.downloads)


def test_pickled_weights_are_not_taken(hub: Hub, folder: Path) -> None:
    del hub.files[WEIGHTS]
    assert "no weights as safetensors" in complaint(fetch(hub, folder), NO_SUCH_MODEL)
    assert "pytorch_model.bin" not in hub.downloads


@pytest.fixture
def gguf_hub(tmp_path: Path) -> Iterator[Hub]:
    """A repository of GGUF files alone."""
    content = write_gguf(tmp_path / "tiny.gguf", tiny_models.build("qwen3")).read_bytes()
    files = {"README.md": b"# Tiny", "config.json": b"{}", "tiny-Q8_0.gguf": content, "tiny-Q4_K_M.gguf": content}
    with running_hub(Hub(MODEL, COMMIT, files)) as hub:
        yield hub


def test_of_several_gguf_files_the_one_that_is_named_is_fetched_alone(gguf_hub: Hub, tmp_path: Path) -> None:
    unnamed = complaint(cache(gguf_hub, tmp_path), NO_SUCH_MODEL)
    assert unnamed.endswith("has 2 GGUF files, and one of them is to be named: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf")
    wrong = cache(gguf_hub, tmp_path, name=f"{MODEL}:Q6_K")
    assert wrong.stderr.endswith("has no GGUF file Q6_K, but tiny-Q4_K_M.gguf, tiny-Q8_0.gguf\n")
    assert gguf_hub.downloads == []
    for name in (f"{MODEL}:Q4_K_M", f"{MODEL}:tiny-Q4_K_M.gguf"):
        done = cache(gguf_hub, tmp_path, name=name)
        assert done.returncode == 0, done.stderr
    assert gguf_hub.downloads == ["tiny-Q4_K_M.gguf"]
    again = cache(gguf_hub, tmp_path, name=f"{MODEL}:q4_k_m", HF_ENDPOINT="http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, "")


def test_the_only_gguf_file_of_a_model_needs_no_name_and_runs(gguf_hub: Hub, folder: Path) -> None:
    del gguf_hub.files["tiny-Q8_0.gguf"]
    done = fetch(gguf_hub, folder)
    assert done.returncode == 0, done.stderr
    assert gguf_hub.downloads == ["tiny-Q4_K_M.gguf"]
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE


def test_several_at_the_same_time_download_once(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.gate.clear()
    arguments = ("--revision", COMMIT, "--to", str(folder))
    processes = [start(hub, folder.parent.parent / "home", *arguments) for _ in range(2)]
    hub.gate.set()
    assert [ended(process).returncode for process in processes] == [0, 0]
    assert sorted(hub.downloads) == sorted(files.keys() - NOT_NEEDED.keys())


def test_a_broken_connection_is_made_anew(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.cut[WEIGHTS] = len(files[WEIGHTS]) // 2
    done = fetch(hub, folder)
    assert done.returncode == 0, done.stderr
    assert hub.downloads.count(WEIGHTS) == 2
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_that_is_not_what_the_hub_lists_is_named_and_fetched_again(hub: Hub, folder: Path, name: str) -> None:
    content = bytearray(hub.files[name])
    content[-1] ^= 1
    hub.instead[name] = bytes(content)
    assert name in complaint(fetch(hub, folder), FAILED)
    assert not folder.exists()
    hub.instead.clear()
    assert fetch(hub, folder).returncode == 0
    assert (folder / name).read_bytes() == hub.files[name]


def test_a_file_that_is_too_short_is_no_model(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.instead[WEIGHTS] = files[WEIGHTS][:-100]
    assert "has not arrived whole" in complaint(fetch(hub, folder), FAILED)
    assert not folder.exists()


def test_a_folder_takes_a_commit_alone(hub: Hub, folder: Path) -> None:
    done = fetch(hub, folder, "main")
    assert done.returncode == 2
    assert "--revision: main is no commit" in done.stderr


def test_a_revision_that_there_is_not_is_named(hub: Hub, folder: Path) -> None:
    assert "has no revision v9" in complaint(cache(hub, folder.parent, "--revision", "v9"), NO_SUCH_MODEL)


@pytest.mark.parametrize(("name", "held"), [("OUTRIDER_MODEL", f"a/b at {COMMIT}"), ("thesis.txt", "something else")])
def test_a_folder_that_holds_something_else_is_left_alone(hub: Hub, folder: Path, name: str, held: str) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text(held)
    assert f"{folder} holds {held}" in complaint(fetch(hub, folder), OCCUPIED)
    assert (folder / name).read_text() == held


def test_what_can_be_no_name_is_said_to_be_none(hub: Hub, tmp_path: Path) -> None:
    done = cache(hub, tmp_path, name="a--b/..")
    assert (done.returncode, done.stderr) == (NO_SUCH_MODEL, "error: a--b/..: is no name of a model on the hub\n")


def test_a_gated_model_needs_the_token(hub: Hub, folder: Path) -> None:
    hub.token = "hf_secret"
    refused = fetch(hub, folder, HF_TOKEN="hf_other")
    assert "HF_TOKEN" in complaint(refused, NO_SUCH_MODEL)
    assert "hf_other" not in refused.stdout + refused.stderr
    done = fetch(hub, folder, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr


def test_a_hub_that_cannot_be_used_is_said_to(hub: Hub, folder: Path) -> None:
    hub.is_broken = True
    assert "cannot be read from the hub" in complaint(fetch(hub, folder), FAILED)
    away = complaint(fetch(hub, folder, HF_ENDPOINT="http://127.0.0.1:9"), FAILED)
    assert "the hub cannot be reached (connection refused)" in away
    assert "switched off by HF_HUB_OFFLINE" in complaint(fetch(hub, folder, HF_HUB_OFFLINE="1"), FAILED)
    assert not folder.exists()


def test_progress_has_the_name_the_bytes_and_the_rate() -> None:
    line = progress_line("Qwen/Qwen3-8B", 1_200_000_000, 16_381_516_776, 10.0)
    assert line == "downloading Qwen/Qwen3-8B: 1.2 GB of 16.4 GB, 120.0 MB/s"
    assert progress_line("a/b", 0, 999) == "downloading a/b: 0 B of 999 B"


def test_every_status_is_explained() -> None:
    for status in (0, FAILED, 2, NO_SUCH_MODEL, OCCUPIED):
        assert f"\n  {status}  " in STATUSES
