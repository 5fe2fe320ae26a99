"""The Makefile tells what it does while it takes minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("target", "extra", "size"), [("demo", "demo", "1.3 GB"), ("kernels", "triton", "0.7 GB")])
def test_an_install_says_how_much_it_brings_and_pip_is_not_silenced(
    tmp_path: Path, target: str, extra: str, size: str
) -> None:
    ran = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path}/new"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    installs = [number for number, line in enumerate(lines) if f"-e '.[{extra}]'" in line]
    assert len(installs) == 1
    pip = lines[installs[0]]
    assert "--quiet" not in pip
    assert " -q" not in pip
    told = " ".join(lines[: installs[0]])
    assert f"installing outrider[{extra}] into {tmp_path}/new: some minutes, {size}" in told
