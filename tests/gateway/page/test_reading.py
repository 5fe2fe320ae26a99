"""How the page reads a stream, without a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("node") is None, reason="no node: it runs the tests")
def test_what_is_read_of_a_stream() -> None:
    ran = subprocess.run(
        ["node", "--test", *map(str, HERE.glob("*.test.mjs"))], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout
