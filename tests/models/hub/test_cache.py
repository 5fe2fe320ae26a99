"""A model on its way into the hub's cache: how far it is, and what a second start finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, running_hub

pytestmark = pytest.mark.slow

MODEL, COMMIT, WEIGHTS = "somebody/tiny", "0123456789abcdef0123456789abcdef01234567", "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    WEIGHTS: b"w" * 3_000_000,
    "README.md": b"# Tiny",
    "pytorch_model.bin": b"a pickle",
}
NUM_BYTES = len(FILES["config.json"]) + len(FILES[WEIGHTS])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub(MODEL, COMMIT, dict(FILES))) as hub:
        yield hub


def run(hub: Hub, home: Path, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = bare | {"HF_ENDPOINT": hub.address, "HOME": str(home), "HF_HOME": str(home)}
    command = [sys.executable, "-m", "outrider.models.hub.cache", model]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_download_says_how_much_there_is_and_a_second_start_says_nothing(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert lines[0] == (0, NUM_BYTES)
    assert lines[-1] == (NUM_BYTES, NUM_BYTES)
    assert {Path(path).name for path in hub.downloads} == {"config.json", WEIGHTS}
    hub.downloads.clear()
    again = run(hub, tmp_path)
    assert (again.returncode, again.stdout, hub.downloads) == (0, "", [])


def test_a_download_that_was_cut_is_taken_up(hub: Hub, tmp_path: Path) -> None:
    hub.cut[WEIGHTS] = 1_000_000
    run(hub, tmp_path)
    assert run(hub, tmp_path).returncode == 0
    blobs = [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size == len(FILES[WEIGHTS])]
    assert len(blobs) == 1


def test_of_a_model_that_cannot_be_served_the_config_alone_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.files["config.json"] = b'{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}'
    done = run(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [Path(path).name for path in hub.downloads] == ["config.json"]
