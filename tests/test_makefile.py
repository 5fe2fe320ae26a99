"""The Makefile installs what everybody else has, and reports its progress while it takes minutes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("target", "extra", "size"), [("demo", "demo", "1.3 GB"), ("kernels", "triton", "0.7 GB")])
@pytest.mark.parametrize("uv", ["", "/usr/bin/uv"])
def test_an_install_says_how_much_it_brings_and_takes_locked_versions(
    tmp_path: Path, target: str, extra: str, size: str, uv: str
) -> None:
    command = ["make", "-n", target, f"VENV={tmp_path}/new", f"UV={uv}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = ran.stdout.replace("\\\n", "").splitlines()
    (number,) = [number for number, line in enumerate(lines) if f"-e '.[{extra}]'" in line]
    assert " -c constraints.txt " in lines[number]
    assert ("/usr/bin/uv pip install " in lines[number]) == bool(uv)
    told = " ".join(lines[:number])
    assert f"installing outrider[{extra}] into {tmp_path}/new: some minutes, {size}" in told


def test_constraints_name_every_package_and_no_place() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; .+)?", line)] == []
    names = {line.partition("==")[0] for line in lines}
    # Builds of torch differ in which of these they bring.
    assert not any(name.startswith(("nvidia-", "cuda-")) for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [needed for extra in project["optional-dependencies"].values() for needed in extra]
    wanted = {re.split(r"[\[<>=]", needed)[0].lower() for needed in [*project["dependencies"], *extras]}
    assert wanted - names == {"outrider"}


def test_a_quiet_command_keeps_its_output_to_itself(tmp_path: Path) -> None:
    command = [ROOT / ".ci" / "quietly", tmp_path / "log", "sh", "-c", "echo much; echo more >&2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")
    assert (tmp_path / "log").read_text() == "much\nmore\n"


def test_a_quiet_command_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    command = [ROOT / ".ci" / "quietly", tmp_path / "log", "sh", "-c", "seq 100; exit 7"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 7
    *shown, complaint = ran.stdout.splitlines()
    assert shown == [str(number) for number in range(81, 101)]
    assert complaint == f"error: sh failed with status 7; {tmp_path}/log has all of its output"
