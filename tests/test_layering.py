"""Who may import whom. Reads the imports of every file, lazy ones and those for types included.

core  <-  models  <-  {verifier, speculator}
core  <-  rpc (with v1)  <-  {verifier, speculator, datastore}  <-  nobody: services meet only on the wire
speculator  <-  edge: an edge is a speculator that dials the verifier instead of being dialled
core, rpc, v1  <-  outrider_client, and edge  <-  its edge.py alone, which runs one in the application's process
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICES = ROOT / "services" / "outrider"
CLIENT = ROOT / "clients" / "outrider_client"

OWN_IMPORTS = {
    "core": {"core"},
    "models": {"core", "models"},
    "rpc": {"core", "rpc", "v1"},
    "verifier": {"core", "models", "rpc", "v1", "verifier"},
    "speculator": {"core", "models", "rpc", "v1", "speculator"},
    "datastore": {"core", "rpc", "v1", "datastore"},
    "edge": {"core", "models", "rpc", "v1", "speculator", "edge"},
    "v1": {"v1"},
}
"""Package below `outrider` -> packages below `outrider` that it may import. `version` is free for all."""

IMPURE = {"asyncio", "datetime", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
"""What would give core a clock, a thread, a file or a chance of its own."""

HOMES = {
    "torch": ("services/outrider/models/",),
    "transformers": ("services/outrider/models/",),
    "safetensors": ("services/outrider/models/",),
    "tokenizers": ("services/outrider/models/",),
    "huggingface_hub": ("services/outrider/models/",),
    "redis": ("services/outrider/datastore/",),
    "hiredis": ("services/outrider/datastore/",),
    "pydivsufsort": ("services/outrider/datastore/",),
    "prometheus_client": ("services/outrider/rpc/metrics.py",),
    "opentelemetry": (
        "services/outrider/rpc/tracing.py",
        "services/outrider/rpc/trace_export.py",
        "clients/outrider_client/bench/observability/sink.py",
    ),
    "typer": ("clients/outrider_client/",),
    "matplotlib": ("clients/outrider_client/bench/",),
}
"""Third-party package -> where alone it may be imported."""


def imports_of(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield node.module
            if node.module == "outrider":  # from outrider import core
                yield from (f"outrider.{alias.name}" for alias in node.names)


def files(folder: Path) -> list[Path]:
    """All Python files below a folder."""
    found = sorted(folder.rglob("*.py"))
    assert found, f"no files in {folder}"
    return found


def own_packages(path: Path) -> set[str]:
    """Packages below `outrider` that a file imports."""
    parts = (name.split(".") for name in imports_of(path))
    return {part[1] for part in parts if part[0] == "outrider" and len(part) > 1} - {"version"}


@pytest.mark.parametrize("package", OWN_IMPORTS)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for path in files(SERVICES / package):
        wrong = own_packages(path) - OWN_IMPORTS[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in SERVICES.glob("*/__init__.py")}
    assert packages == set(OWN_IMPORTS)


def test_core_imports_numpy_and_the_standard_library_only() -> None:
    for path in files(SERVICES / "core"):
        roots = {name.partition(".")[0] for name in imports_of(path)} - {"outrider", "numpy"}
        assert roots <= set(sys.stdlib_module_names) - IMPURE, f"{path.relative_to(ROOT)} imports {sorted(roots)}"


@pytest.mark.parametrize("package", HOMES)
def test_a_third_party_package_has_one_home(package: str) -> None:
    for path in (*files(SERVICES), *files(CLIENT)):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(HOMES[package]):
            roots = {name.partition(".")[0] for name in imports_of(path)}
            assert package not in roots, f"{name} imports {package}"


def test_the_client_imports_no_service() -> None:
    for path in files(CLIENT):
        allowed = {"core", "rpc", "v1"}
        if path.is_relative_to(CLIENT / "bench"):
            allowed |= {"models"}  # the baselines run the same models without the services
        if path == CLIENT / "edge.py":
            allowed |= {"edge"}  # the drafter runs inside the application there
        wrong = own_packages(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"


def test_services_do_not_import_the_client() -> None:
    for path in files(SERVICES):
        roots = {name.partition(".")[0] for name in imports_of(path)}
        assert "outrider_client" not in roots, f"{path.relative_to(ROOT)} imports outrider_client"
