"""Runs checkov on everything that deploy/ renders to.

    make checkov

Deliberate exceptions are skipped, each check with its reason, in deploy/.checkov.yaml.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.manifests import DEPLOY, rendered_text, variants


def main(checkov: str) -> int:
    """The exit status of checkov, which is 1 if a check fails."""
    with tempfile.TemporaryDirectory() as temporary:
        for variant in variants():
            Path(temporary, f"{variant}.yaml").write_text(rendered_text(variant), encoding="utf-8")
        config = str(DEPLOY / ".checkov.yaml")
        command = [checkov, "--config-file", config, "--directory", temporary, "--framework", "kubernetes"]
        return subprocess.run([*command, "--quiet", "--compact", "--skip-download"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
