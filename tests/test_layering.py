"""Which packages may import which. Reads the imports of every file, including lazy ones and those for types.

core  <-  models  <-  {verifier, speculator}
core  <-  rounds  <-  {verifier, vllm}
core, rounds, peers  <-  vllm: the proposer in vLLM, without a model of ours
core, telemetry  <-  wire  <-  security  <-  {peers, server}  <-  {verifier, speculator, datastore}  <-  nobody
speculator  <-  edge: an edge is a speculator that dials the verifier instead of being dialled
speculator  <-  two files of the verifier, for a draft model in its own process
core, wire, security, telemetry  <-  outrider_client  <-  outrider_cli  <-  outrider_bench  <-  outrider_draft
edge  <-  outrider_client.edge alone, which runs one in the application's process
outrider_client, server  <-  outrider_gateway: a client of the verifier that serves HTTP
outrider_gateway.tools.calls  <-  outrider_cli: the names of the formats in which models write calls

Services meet only on the wire.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from outrider.core.methods import METHODS

ROOT = Path(__file__).parent.parent
SERVICES = ROOT / "services" / "outrider"
CLIENT = ROOT / "clients" / "outrider_client"
GATEWAY = ROOT / "clients" / "outrider_gateway"
CLI = ROOT / "clients" / "outrider_cli"
BENCH = ROOT / "clients" / "outrider_bench"
DRAFT = ROOT / "clients" / "outrider_draft"
TESTS = ROOT / "tests"

AROUND_GRPC = {"core", "v1", "telemetry", "wire", "security", "peers", "server"}
"""Packages that every service may import, besides models."""

OWN_IMPORTS = {
    "core": {"core"},
    "models": {"core", "models"},
    "telemetry": {"core", "v1", "telemetry"},
    "wire": {"core", "v1", "telemetry", "wire"},
    "security": {"core", "v1", "telemetry", "wire", "security"},
    "peers": AROUND_GRPC - {"server"},
    "server": AROUND_GRPC - {"peers"},
    "rounds": {"core", "rounds"},
    "verifier": AROUND_GRPC | {"models", "rounds", "verifier"},
    "speculator": AROUND_GRPC | {"models", "speculator"},
    "datastore": (AROUND_GRPC - {"peers"}) | {"datastore"},
    "edge": AROUND_GRPC | {"models", "speculator", "edge"},
    "vllm": (AROUND_GRPC - {"server"}) | {"rounds", "vllm"},
    "v1": {"v1"},
}
"""Package below `outrider` -> packages below `outrider` that it may import. `version` is free for all."""

WITH_A_DRAFT_MODEL = [SERVICES / "verifier" / name for name in ("in_process_speculator.py", "service.py")]
"""Files of the verifier that may import the speculator: the in-process drafter, and the file that makes all parts."""

IMPURE = {"asyncio", "datetime", "logging", "os", "random", "socket", "subprocess", "threading", "time"}
"""Modules that would give core a clock, a thread, a file or randomness of its own."""

HOMES = {
    "torch": ("services/outrider/models/", "clients/outrider_bench/workers/", "clients/outrider_draft/"),
    "transformers": ("services/outrider/models/", "clients/outrider_bench/workers/", "clients/outrider_draft/"),
    "safetensors": ("services/outrider/models/", "clients/outrider_draft/"),
    "tokenizers": ("services/outrider/models/",),
    "huggingface_hub": ("services/outrider/models/",),
    "llguidance": ("services/outrider/models/structure.py",),
    "redis": ("services/outrider/datastore/redis/",),
    "hiredis": ("services/outrider/datastore/redis/",),
    "pydivsufsort": ("services/outrider/datastore/",),
    "starlette": ("clients/outrider_gateway/",),
    "uvicorn": ("clients/outrider_gateway/run.py", "clients/outrider_gateway/connections.py"),
    "prometheus_client": ("services/outrider/telemetry/metrics.py",),
    "opentelemetry": (
        "services/outrider/telemetry/tracing.py",
        "services/outrider/server/export.py",
    ),
    "typer": ("clients/outrider_cli/", "clients/outrider_bench/", "clients/outrider_draft/"),
    "vllm": ("services/outrider/vllm/proposer.py",),
    "gguf": ("services/outrider/models/", "clients/outrider_bench/workers/"),
}
"""Third-party package -> the only places that may import it."""


@cache
def imports_of(path: Path) -> list[str]:
    """Returns the full names of everything that a file imports."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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
        allowed = OWN_IMPORTS[package] | ({"speculator"} if path in WITH_A_DRAFT_MODEL else set())
        wrong = own_packages(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"


def test_devices_meet_in_the_backend_alone() -> None:
    """Timing captures a GPU's products; and each device falls back on torch."""
    devices = {"cpu": {"backend.py"}, "cuda": {"backend.py", "timing.py"}}
    for path in files(SERVICES):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["outrider", "models"] and len(parts) > 2 and parts[2] in devices:
                is_own = path.is_relative_to(SERVICES / "models" / parts[2])
                is_meeting = path.parent == SERVICES / "models" and path.name in devices[parts[2]]
                assert is_own or is_meeting, f"{path.relative_to(ROOT)} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = [*files(SERVICES), *files(CLIENT), *files(GATEWAY), *files(CLI), *files(BENCH), *files(DRAFT)]
    modules = {_module_of(path): path for path in paths}
    imports = {name: {each for each in _modules_of(path, modules) if each != name} for name, path in modules.items()}
    while leaves := [name for name, imported in imports.items() if not imported & imports.keys()]:
        for name in leaves:
            del imports[name]
    # The rest are cycles, and files that import them.
    assert not imports, f"circles among {sorted(imports)}"


def _module_of(path: Path) -> str:
    parts = path.relative_to(SERVICES.parent if path.is_relative_to(SERVICES) else CLIENT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules_of(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yields the modules that a file imports, and those that names are imported from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (each if each in modules else node.module for each in whole)


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in SERVICES.glob("*/__init__.py")}
    assert packages == set(OWN_IMPORTS)


def test_core_imports_numpy_and_the_standard_library_only() -> None:
    for path in files(SERVICES / "core"):
        roots = {name.partition(".")[0] for name in imports_of(path)} - {"outrider", "numpy"}
        assert roots <= set(sys.stdlib_module_names) - IMPURE, f"{path.relative_to(ROOT)} imports {sorted(roots)}"


@pytest.mark.parametrize("package", HOMES)
def test_a_third_party_package_has_one_home(package: str) -> None:
    for path in (*files(SERVICES), *files(CLIENT), *files(GATEWAY), *files(CLI), *files(BENCH), *files(DRAFT)):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(HOMES[package]):
            roots = {name.partition(".")[0] for name in imports_of(path)}
            assert package not in roots, f"{name} imports {package}"


CLIENT_IMPORTS = {"core", "wire", "security", "telemetry", "v1"}


def client_packages(path: Path) -> set[str]:
    """Client packages that a file imports."""
    return {name.partition(".")[0] for name in imports_of(path) if name.startswith("outrider_")}


def test_the_client_imports_no_service() -> None:
    for path in files(CLIENT):
        # The drafter runs inside the application there.
        allowed = CLIENT_IMPORTS | ({"edge", "server"} if path == CLIENT / "edge.py" else set())
        wrong = own_packages(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"
        assert client_packages(path) <= {"outrider_client"}, f"{path.relative_to(ROOT)} imports what stands on it"


def test_commands_stand_on_the_client() -> None:
    for path in files(CLI):
        wrong = own_packages(path) - CLIENT_IMPORTS
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"
        # `outrider bench` and `outrider draft` are imported on demand, by the one file that holds all commands.
        on_demand = {"outrider_bench", "outrider_draft"} if path == CLI / "app.py" else set()
        allowed = {"outrider_client", "outrider_cli"} | on_demand
        of_calls = {"outrider_gateway"} - {
            name.partition(".")[0] for name in imports_of(path) if name != "outrider_gateway.tools.calls"
        }
        wrong = client_packages(path) - allowed - of_calls
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_benchmarks_reach_into_services_in_their_workers_only() -> None:
    for path in files(BENCH):
        # Baselines run the same models without the services; a worker measures inside its own process.
        allowed = CLIENT_IMPORTS | {"models"}
        if path.is_relative_to(BENCH / "workers"):
            allowed |= {"server", "rounds", "verifier", "speculator"}
        wrong = own_packages(path) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"


def test_the_gateway_is_a_client_that_serves() -> None:
    for path in files(GATEWAY):
        wrong = own_packages(path) - CLIENT_IMPORTS - {"server"}
        assert not wrong, f"{path.relative_to(ROOT)} imports outrider.{sorted(wrong)}"
        wrong = client_packages(path) - {"outrider_client", "outrider_gateway"}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_services_import_no_client() -> None:
    for path in files(SERVICES):
        wrong = client_packages(path)
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_a_method_is_asked_what_it_does_and_never_which_it_is() -> None:
    methods = SERVICES / "core" / "methods"
    for path in files(SERVICES):
        if path.parent == methods:
            continue
        where = path.relative_to(ROOT)
        inside = [name for name in imports_of(path) if name.startswith("outrider.core.methods.")]
        assert not inside, f"{where} imports {inside}: what others need of a method is in its description"
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        constants = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and node.module in ("outrider.core.methods", "outrider.core.speculation")
            for alias in node.names
            if alias.name.lower().replace("_", "-") in METHODS
        }
        for node in nodes:
            if isinstance(node, ast.Compare | ast.match_case):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                is_of_method = "method" in names | attributes
                assert not constants & names, f"{where} compares a method: {ast.unparse(node)}"
                assert not (is_of_method and words & METHODS.keys()), f"{where} compares a name: {ast.unparse(node)}"


def test_tests_share_only_what_is_in_support() -> None:
    for path in files(TESTS):
        folder = path.relative_to(TESTS).parts[0]
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "tests" or len(parts) == 1:
                continue
            where = f"{path.relative_to(ROOT)} imports {name}"
            assert not parts[-1].startswith("test_"), f"{where}: what two tests need has a file that is no test"
            assert parts[1] in ("support", folder), f"{where}: what two folders need belongs into tests/support"
            assert folder != "support" or parts[1] == "support", f"{where}: support stands on no test"
