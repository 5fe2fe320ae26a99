"""The repository has what a clone needs, and nothing that only one machine has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_MIB = 60


def tracked(*options: str) -> list[str]:
    """Git's output about the files that it tracks, one line each."""
    command = ["git", "ls-files", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")


def test_no_link_is_tracked() -> None:
    # A link to an environment would be in the way of the one that `make` makes.
    assert [line for line in tracked("--stage") if line.startswith("120000")] == []


def test_nothing_that_is_ignored_is_tracked() -> None:
    assert tracked("--cached", "--ignored", "--exclude-standard") == []


def test_a_clone_is_small() -> None:
    assert sum((ROOT / name).stat().st_size for name in tracked() if (ROOT / name).exists()) < MAX_MIB << 20
