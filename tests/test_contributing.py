"""The change that CONTRIBUTING shows works, applied to a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORTS = """
from outrider.core.methods import FAN, growth_policy
from outrider.core.speculation import SpeculationParams
from outrider.v1 import types_pb2
from outrider.wire.speculation import METHODS_TO_PROTO
from tests.core.methods.toy_speculator import ToySpeculator, one_after_another, paths

def test_the_wire_has_it() -> None:
    assert METHODS_TO_PROTO[FAN] == types_pb2.METHOD_FAN
"""


def apply(diff: str, root: Path) -> None:
    """Inserts the added lines after the line that stands before them, which a file has once."""
    path, before = root, ""
    for line in diff.splitlines():
        if line.startswith("--- "):
            path = root / line.removeprefix("--- ")
        elif line.startswith("+"):
            text = path.read_text(encoding="utf-8")
            assert text.count(f"{before}\n") == 1, f"{path} has not one line {before!r}"
            path.write_text(text.replace(f"{before}\n", f"{before}\n{line[1:]}\n"), encoding="utf-8")
            before = line[1:]
        else:
            before = line[1:]


@pytest.mark.slow
def test_the_change_that_is_followed_through_the_code_works(tmp_path: Path) -> None:
    for name in ("services", "protos", "tests/core/methods"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    document = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diff, policy, test = re.findall(r"^```(?:diff|python)\n(.*?)^```", document, re.M | re.S)
    apply(diff, tmp_path)
    (tmp_path / policy.splitlines()[0].removeprefix("# ")).write_text(policy, encoding="utf-8")
    test_file = test.splitlines()[0].removeprefix("# ")
    (tmp_path / test_file).write_text(IMPORTS + test, encoding="utf-8")

    generate = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--python_out=services"]
    subprocess.run([*generate, "protos/outrider/v1/types.proto"], cwd=tmp_path, check=True, timeout=60)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_file]
    environment = os.environ | {"PYTHONPATH": "services"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
