"""A service whose extra is not installed says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.server.extras import needs_extra

WITHOUT = """
import runpy, sys
sys.modules[{missing!r}] = None  # as if it were not installed
sys.argv = ["outrider", "--listen", "127.0.0.1:0"]  # whatever else runs on this machine
runpy.run_module({service!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("service", "missing", "extra"),
    [
        ("outrider.verifier", "pydantic", "models"),
        ("outrider.speculator", "structlog", "models"),
        ("outrider.edge", "prometheus_client", "models"),
        ("outrider.datastore", "grpc_reflection", "datastore"),
        ("outrider_gateway", "uvicorn", "gateway"),
        ("outrider_gateway", "pydantic", "gateway"),
    ],
)
def test_a_service_without_its_extra_names_it_in_one_line(service: str, missing: str, extra: str) -> None:
    script = WITHOUT.format(service=service, missing=missing)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"error: {missing} is not installed: pip install -e '.[{extra}]'\n"


def test_a_module_of_ours_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("models"):
        import outrider.nonsense  # type: ignore[import-not-found]  # noqa: F401
