"""Models are fetched from a hub: one commit, checked, at once or not at all."""

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

from outrider.models.hub.checksums import UnusableList, parse_list
from outrider.models.hub.fetch import FAILED, NOT_THERE, STATUSES, WRONG, WRONG_FLAGS
from outrider.models.loading import build_hf_model, load_model
from tests.support import tiny_models
from tests.support.hub_server import Hub, running_hub, sha256

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
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model as a repository holds it, and what else lies in repositories."""
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
    """Where the model is to go."""
    return tmp_path / "models" / "target"


def start(hub: Hub, folder: Path, *arguments: str, revision: str = COMMIT, **env: str) -> subprocess.Popen[str]:
    """Starts the program, with a home of its own and told to stay offline, as services are."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    home = folder.parent.parent / "home"
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "outrider.models.hub.fetch", "--model", MODEL, "--revision", revision]
    return subprocess.Popen(
        [*command, "--to", str(folder), *arguments],
        env=bare | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "1", "HOME": str(home)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(
    hub: Hub, folder: Path, *arguments: str, revision: str = COMMIT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program."""
    process = start(hub, folder, *arguments, revision=revision, **env)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def complaint(ended: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line that says what is wrong."""
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def sums_file(hub: Hub, path: Path, **other: str) -> str:
    """A list of the files that loading needs, and of others."""
    sums = {name: sha256(content) for name, content in hub.files.items() if name not in NOT_NEEDED} | other
    path.write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    return str(path)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_is_fetched_and_runs(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    ended = fetch(hub, folder)
    assert ended.returncode == 0, ended.stderr
    assert entries(folder) == files.keys() - NOT_NEEDED.keys() | {"SHA256SUMS"}
    assert entries(folder.parent) == {"target", ".target.lock"}
    assert not any((folder.parent.parent / "home").iterdir())
    assert not NOT_NEEDED.keys() & set(hub.downloads)
    ids = tiny_models.text(12)
    with torch.inference_mode():
        logits = build_hf_model(str(folder))[0](torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, tiny_models.reference_logits("llama", ids))
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE


def test_a_model_in_several_files_is_fetched(hub: Hub, folder: Path, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    del hub.files[WEIGHTS]
    hub.files |= {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert fetch(hub, folder).returncode == 0
    assert len([name for name in entries(folder) if name.endswith(".safetensors")]) > 1
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE


def test_a_part_that_the_hub_lacks_is_named(hub: Hub, folder: Path, tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    parts = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    lacking = min(name for name in parts if name.endswith(".safetensors"))
    del hub.files[WEIGHTS], parts[lacking]
    hub.files |= parts
    assert lacking in complaint(fetch(hub, folder), NOT_THERE)
    assert not folder.exists()


def test_pickled_weights_are_not_taken(hub: Hub, folder: Path) -> None:
    del hub.files[WEIGHTS]
    assert "safetensors" in complaint(fetch(hub, folder), NOT_THERE)
    assert hub.downloads == []


def test_a_second_run_asks_nobody(hub: Hub, folder: Path) -> None:
    assert fetch(hub, folder).returncode == 0
    before = len(hub.downloads)
    assert fetch(hub, folder, HF_ENDPOINT="http://127.0.0.1:9").returncode == 0
    assert len(hub.downloads) == before


def test_a_damaged_file_alone_is_fetched_again(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    assert fetch(hub, folder).returncode == 0
    content = bytearray(files[WEIGHTS])
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    hub.downloads.clear()
    ended = fetch(hub, folder)
    assert ended.returncode == 0, ended.stderr
    assert WEIGHTS in ended.stderr
    assert hub.downloads.count(WEIGHTS) == 1
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_several_at_the_same_time_download_once(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.gate.clear()
    processes = [start(hub, folder) for _ in range(3)]
    assert sorted("waiting" in _first_line(process) for process in processes) == [False, True, True]
    hub.gate.set()
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sorted(hub.downloads) == sorted(files.keys() - NOT_NEEDED.keys())


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_broken_connection_is_made_anew(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.cut[WEIGHTS] = len(files[WEIGHTS]) // 2
    ended = fetch(hub, folder)
    assert ended.returncode == 0, ended.stderr
    assert hub.downloads.count(WEIGHTS) == 2
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_a_file_that_is_too_short_is_no_model(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    hub.instead[WEIGHTS] = files[WEIGHTS][:-100]
    assert "has not arrived whole" in complaint(fetch(hub, folder), FAILED)
    assert not folder.exists()
    hub.instead.clear()
    assert fetch(hub, folder).returncode == 0


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_that_is_not_what_the_hub_lists_is_named_and_goes(hub: Hub, folder: Path, name: str) -> None:
    content = bytearray(hub.files[name])
    content[-1] ^= 1
    hub.instead[name] = bytes(content)
    assert name in complaint(fetch(hub, folder), WRONG)
    assert not folder.exists()
    assert not (folder.parent / ".target.partial" / name).exists()
    hub.instead.clear()
    assert fetch(hub, folder).returncode == 0


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_that_differs_from_the_list_is_named_and_goes(hub: Hub, folder: Path, tmp_path: Path, name: str) -> None:
    sums = sums_file(hub, tmp_path / "sums", **{name: "0" * 64})
    assert name in complaint(fetch(hub, folder, "--sha256sums", sums), WRONG)
    assert not folder.exists()
    assert not (folder.parent / ".target.partial" / name).exists()


def test_a_list_that_fits_is_no_obstacle(hub: Hub, folder: Path, tmp_path: Path) -> None:
    sums = sums_file(hub, tmp_path / "sums")
    assert fetch(hub, folder, "--sha256sums", sums).returncode == 0
    again = fetch(hub, folder, "--check", "--sha256sums", str(folder / "SHA256SUMS"))
    assert again.returncode == 0, again.stderr


def test_a_list_with_a_file_that_the_hub_lacks_is_refused(hub: Hub, folder: Path, tmp_path: Path) -> None:
    sums = sums_file(hub, tmp_path / "sums", **{"merges.txt": "0" * 64})
    assert "merges.txt" in complaint(fetch(hub, folder, "--sha256sums", sums), WRONG)
    assert hub.downloads == []


def test_a_file_that_the_list_lacks_is_refused(hub: Hub, folder: Path, tmp_path: Path) -> None:
    sums = sums_file(hub, tmp_path / "sums")
    hub.files["chat_template.jinja"] = b"{{ messages }}"
    assert "chat_template.jinja" in complaint(fetch(hub, folder, "--sha256sums", sums), WRONG)
    assert hub.downloads == []


def test_a_model_in_place_that_differs_from_the_list_does_not_stay(hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert fetch(hub, folder).returncode == 0
    sums = sums_file(hub, tmp_path / "sums", **{"config.json": "0" * 64})
    assert "config.json" in complaint(fetch(hub, folder, "--sha256sums", sums), WRONG)
    assert not folder.exists()


def test_a_revision_that_moves_is_taken_only_if_told_so(hub: Hub, folder: Path) -> None:
    assert "--allow-moving-revision" in complaint(fetch(hub, folder, revision="main"), WRONG_FLAGS)
    ended = fetch(hub, folder, "--allow-moving-revision", revision="main")
    assert ended.returncode == 0, ended.stderr
    assert (folder / "SHA256SUMS").read_text().startswith(f"# {MODEL} at {COMMIT}\n")
    before = len(hub.downloads)
    assert fetch(hub, folder, "--allow-moving-revision", revision="main").returncode == 0
    assert len(hub.downloads) == before


def test_a_revision_that_there_is_not_is_named(hub: Hub, folder: Path) -> None:
    assert "f" * 40 in complaint(fetch(hub, folder, revision="f" * 40), NOT_THERE)


def test_a_folder_with_another_revision_is_left_alone(hub: Hub, folder: Path) -> None:
    assert fetch(hub, folder).returncode == 0
    hub.commit = "f" * 40
    assert COMMIT in complaint(fetch(hub, folder, revision="f" * 40), WRONG)
    assert COMMIT in complaint(fetch(hub, folder, "--check", revision="f" * 40), WRONG)
    assert load_model(str(folder)).vocab_size == tiny_models.VOCAB_SIZE


def test_a_folder_with_something_else_is_left_alone(hub: Hub, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("all of it")
    assert str(folder) in complaint(fetch(hub, folder), WRONG)
    assert str(folder) in complaint(fetch(hub, folder, "--check"), WRONG)
    assert (folder / "thesis.txt").read_text() == "all of it"


def test_a_gated_model_needs_the_token(hub: Hub, folder: Path) -> None:
    hub.token = "hf_secret"
    refused = fetch(hub, folder, HF_TOKEN="hf_other")
    assert "HF_TOKEN" in complaint(refused, NOT_THERE)
    assert "hf_other" not in refused.stdout + refused.stderr
    ended = fetch(hub, folder, HF_TOKEN="hf_secret")
    assert ended.returncode == 0, ended.stderr


def test_a_hub_that_answers_nonsense_is_said_to(hub: Hub, folder: Path) -> None:
    hub.is_broken = True
    assert "cannot be read from the hub" in complaint(fetch(hub, folder), FAILED)
    assert not folder.exists()


def test_check_writes_nothing(hub: Hub, folder: Path) -> None:
    assert "is not there" in complaint(fetch(hub, folder, "--check"), NOT_THERE)
    assert not folder.parent.exists()


def test_check_sees_a_flipped_bit(hub: Hub, folder: Path, files: dict[str, bytes]) -> None:
    assert fetch(hub, folder).returncode == 0
    assert fetch(hub, folder, "--check").returncode == 0
    content = bytearray(files[WEIGHTS])
    content[1000] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    assert WEIGHTS in complaint(fetch(hub, folder, "--check"), WRONG)


def test_check_sees_a_missing_file(hub: Hub, folder: Path) -> None:
    assert fetch(hub, folder).returncode == 0
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in complaint(fetch(hub, folder, "--check"), NOT_THERE)


def test_check_waits_for_the_model(hub: Hub, folder: Path) -> None:
    waiting = start(hub, folder, "--check", "--wait-s", "60")
    assert fetch(hub, folder).returncode == 0
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err


def test_the_kept_list_is_one_for_sha256sum(hub: Hub, folder: Path) -> None:
    assert fetch(hub, folder).returncode == 0
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "abc  config.json\n", f"{'0' * 64}  ../config.json\n", f"{'0' * 64}  /etc/passwd\n"],
    ids=["empty", "a comment", "no sum", "a way out", "an absolute path"],
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnusableList):
        parse_list(text)


def test_every_status_is_explained() -> None:
    for status in (0, FAILED, WRONG_FLAGS, NOT_THERE, WRONG):
        assert f"\n  {status}  " in STATUSES
