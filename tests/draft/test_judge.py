"""`outrider draft judge`: two drafts of one target, compared by what they are worth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "outrider_cli", "draft")


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_a_trained_draft_is_better_than_one_that_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    made = subprocess.run([*COMMAND, "new", "--target", "demo/target", "--out", folder], timeout=60, check=False)
    assert made.returncode == 0
    flags = ["--target", "demo/target-100m", "--than", "demo/draft", "--quick", "--num-prompts", "1"]
    done = subprocess.run([*COMMAND, "judge", folder, *flags], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"demo/draft is better than {folder}" in done.stdout
    judged = json.loads((folder / "training.json").read_text())["judged"]
    assert judged["target"] == "demo/target-100m"
    own, other = judged["own"], judged["other"]
    assert other["draft"] == "demo/draft"
    assert own["acceptances"][0]["mean"] < other["acceptances"][0]["mean"]
    assert all(one["predicted"] and one["measured"] > 0 for one in own["comparisons"])


@pytest.mark.slow
def test_a_folder_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    flags = ["judge", tmp_path, "--target", "demo/target"]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (f"error: {tmp_path} is no draft: it has no training.json; `outrider draft new` makes one\n")
