"""Downloads of models before services start: the progress, and Ctrl-C in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider_cli.models import download
from tests.support.hub_server import Hub, running_hub

MODEL, COMMIT, WEIGHTS = "somebody/tiny", "0123456789abcdef0123456789abcdef01234567", "model.safetensors"
LEN = 2_000_000
HEADER = b'{"w": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (LEN, LEN)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    WEIGHTS: len(HEADER).to_bytes(8, "little") + HEADER + b"w" * LEN,
}


def test_a_demo_model_and_a_folder_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running_hub(Hub("demo/target", COMMIT, FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        download(["demo/target", str(tmp_path), "./nothing"], lambda line: pytest.fail(line))


@pytest.mark.slow
def test_ctrl_c_ends_a_download_at_once_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    lines: list[str] = []
    with running_hub(Hub(MODEL, COMMIT, FILES)) as hub:
        for name, value in {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        hub.gate.clear()  # nothing arrives: only the child's end lets the call return
        with pytest.raises(KeyboardInterrupt):
            download([MODEL], interrupt)
        assert lines == [f"downloading {MODEL}: 0 B of 2.0 MB"]
        hub.gate.set()
        download([MODEL], lines.append)
        assert lines[-1].startswith(f"downloading {MODEL}: 2.0 MB of 2.0 MB, ")
    download([MODEL], lambda line: pytest.fail(line))
