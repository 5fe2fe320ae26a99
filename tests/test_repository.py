"""The repository has what a clone needs, and nothing that one machine alone has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_MIB = 60


def tracked(*options: str) -> list[str]:
    """What git says of the files that it tracks, a line each."""
    command = ["git", "ls-files", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")


def test_no_link_is_tracked() -> None:
    # One to an environment would stand where `make` wants to make one.
    assert [line for line in tracked("--stage") if line.startswith("120000")] == []


def test_nothing_that_is_ignored_is_tracked() -> None:
    assert tracked("--cached", "--ignored", "--exclude-standard") == []


def test_a_clone_is_small() -> None:
    assert sum((ROOT / name).stat().st_size for name in tracked() if (ROOT / name).exists()) < MAX_MIB << 20
