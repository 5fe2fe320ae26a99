"""The protos: generated code is fresh, everything is commented, enums begin with UNSPECIFIED, v1 has only grown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
GENERATED = ROOT / "services" / "outrider" / "v1"
FILES = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("outrider/v1/*.proto"))

MESSAGES, ENUMS, SERVICES = 4, 5, 6
"""Field numbers in FileDescriptorProto with which the path of a comment begins."""


def protoc(*arguments: str) -> None:
    """Runs the compiler of grpcio-tools on our files."""
    # protoc looks for its plugin for stubs on the PATH, where a virtual environment need not be.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *arguments, *FILES]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path})


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Our files as descriptors, comments included."""
    out = tmp_path_factory.mktemp("descriptors") / "set.bin"
    protoc("--include_source_info", f"--descriptor_set_out={out}")
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


@pytest.mark.slow
def test_the_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    outputs = ("--python_out", "--pyi_out", "--grpc_python_out", "--mypy_grpc_out")
    protoc(*(f"{option}={tmp_path}" for option in outputs))
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "outrider" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in GENERATED.glob("*_pb2*.py*") if path.suffix != ".pyc"}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert not stale, f"run `make proto`: {stale} differ"


def test_everything_has_a_comment(described: list[FileDescriptorProto]) -> None:
    missing = [name for file in described for name in uncommented(file)]
    assert not missing


def test_every_enum_begins_with_unspecified(described: list[FileDescriptorProto]) -> None:
    for file in described:
        for _, enum, name in enums(file):
            zero = enum.value[0]
            assert zero.number == 0
            assert zero.name.endswith("_UNSPECIFIED"), name


def buf(*arguments: str, protos: Path = PROTOS) -> subprocess.CompletedProcess[str]:
    """Runs buf on a folder of protos; skips the test if there is no buf."""
    program = os.environ.get("OUTRIDER_BUF") or shutil.which("buf") or shutil.which(ROOT / "node_modules/.bin/buf")
    if program is None:
        pytest.skip("buf is not installed: npm install @bufbuild/buf, or name it in OUTRIDER_BUF")
    return subprocess.run([program, *arguments], cwd=protos, capture_output=True, text=True, check=False)


def test_buf_has_no_complaint() -> None:
    run = buf("lint")
    assert run.returncode == 0, run.stdout + run.stderr


def test_v1_has_only_grown_since_the_last_release() -> None:
    run = buf("breaking", "--against", str(PROTOS / "released.binpb"))
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_field_that_changes_its_number_is_found(tmp_path: Path) -> None:
    protos = tmp_path / "protos"
    shutil.copytree(PROTOS, protos)
    types = protos / "outrider" / "v1" / "types.proto"
    before = types.read_text(encoding="utf-8")
    types.write_text(before.replace("int32 top_k = 2;", "int32 top_k = 22;"), encoding="utf-8")
    run = buf("breaking", "--against", str(PROTOS / "released.binpb"), protos=protos)
    assert run.returncode != 0
    assert 'name "top_k"' in run.stdout


def uncommented(file: FileDescriptorProto) -> Iterator[str]:
    """Names of all services, rpcs, messages, fields, oneofs, enums and values without a comment before them."""
    comments = {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}
    yield from (name for path, name in commentable(file) if not comments.get(path))


def commentable(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path and name of everything in a file that must have a comment."""
    for index, service in enumerate(file.service):
        yield (SERVICES, index), service.name
        for number, method in enumerate(service.method):
            yield (SERVICES, index, 2, number), f"{service.name}.{method.name}"
    for path, message, name in messages(file):
        yield path, name
        for number, field in enumerate(message.field):
            yield (*path, 2, number), f"{name}.{field.name}"
        real_oneofs = {field.oneof_index for field in message.field if field.HasField("oneof_index")}
        for number in real_oneofs - {f.oneof_index for f in message.field if f.proto3_optional}:
            yield (*path, 8, number), f"{name}.{message.oneof_decl[number].name}"
    for path, enum, name in enums(file):
        yield path, name
        for number, value in enumerate(enum.value):
            yield (*path, 2, number), f"{name}.{value.name}"


def messages(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], DescriptorProto, str]]:
    """All messages, nested ones included."""
    found: list[tuple[tuple[int, ...], DescriptorProto, str]]
    found = [((MESSAGES, index), message, message.name) for index, message in enumerate(file.message_type)]
    while found:
        path, message, name = found.pop()
        yield path, message, name
        # Messages that protoc makes for maps are not in the file.
        nested = [each for each in enumerate(message.nested_type) if not each[1].options.map_entry]
        found += [((*path, 3, index), inner, f"{name}.{inner.name}") for index, inner in nested]


def enums(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], EnumDescriptorProto, str]]:
    """All enums, nested ones included."""
    yield from (((ENUMS, index), enum, enum.name) for index, enum in enumerate(file.enum_type))
    for path, message, name in messages(file):
        yield from (((*path, 4, index), enum, f"{name}.{enum.name}") for index, enum in enumerate(message.enum_type))
