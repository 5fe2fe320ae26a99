"""The protos: generated code is fresh, buf has no complaint, v1 has only grown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
GENERATED = ROOT / "services" / "outrider" / "v1"
FILES = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("outrider/v1/*.proto"))


def protoc(*arguments: str) -> None:
    """Runs the compiler of grpcio-tools on our files."""
    # protoc looks for its plugin for stubs on the PATH, where a virtual environment need not be.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *arguments, *FILES]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path})


@pytest.mark.slow
def test_the_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    outputs = ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out")
    protoc(*(f"{option}={tmp_path}" for option in outputs))
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "outrider" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2*.py*") if path.suffix != ".pyc"}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert not stale, f"run `make proto`: {stale} differ"


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs buf on our protos; skips the test if there is no buf."""
    program = os.environ.get("OUTRIDER_BUF") or shutil.which("buf") or shutil.which(ROOT / "node_modules/.bin/buf")
    if program is None:
        pytest.skip("buf is not installed: npm install @bufbuild/buf, or name it in OUTRIDER_BUF")
    return subprocess.run([program, *arguments], cwd=PROTOS, capture_output=True, text=True, check=False)


def test_buf_has_no_complaint() -> None:
    run = buf("lint")
    assert run.returncode == 0, run.stdout + run.stderr


def test_v1_has_only_grown_since_the_last_release() -> None:
    run = buf("breaking", "--against", str(PROTOS / "released.binpb"))
    assert run.returncode == 0, run.stdout + run.stderr
