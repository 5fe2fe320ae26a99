"""Builds images with buildah, without a registry, and runs programs in them.

The base is a Debian made by debootstrap, with its python3, instead of the Dockerfile's own base; packages come from a
folder of wheels. Both are kept in the cache of continuous integration: they take a minute or two to make.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
DEBIAN, DEBIAN_PYTHON = "bookworm", "3.11"
BASE = "localhost/python:debian"


def lacking() -> str:
    """The tools for building images that this machine lacks; empty = none."""
    programs = ("buildah", "debootstrap", "unshare", "setpriv")
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root")
    return ", ".join(missing)


def cache_folder() -> Path:
    """The cache of continuous integration."""
    fallback = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider-ci"
    return Path(os.environ.get("OUTRIDER_CI_CACHE", fallback)) / "images"


def debian_folder() -> Path:
    """A Debian with python3 and the packages that virtual environments need."""
    folder = cache_folder() / DEBIAN
    if not folder.is_dir():
        partial = folder.with_name(f"{DEBIAN}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # debootstrap cannot resume
        partial.parent.mkdir(parents=True, exist_ok=True)
        packages = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, DEBIAN, str(partial), "http://deb.debian.org/debian")
        partial.rename(folder)
    return folder


def wheels_folder(*extras: str) -> Path:
    """Wheels of the project's requirements with these extras, for Debian's python3."""
    requirements = run(sys.executable, "deploy/requirements.py", *extras).splitlines()
    # The build system, and redis's requirement before Python 3.11.3: pip evaluates that for the Python that it runs on.
    requirements += ["setuptools>=77", "async-timeout"]
    folder = cache_folder() / f"wheels-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        target = ("--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", str(partial))
        run(sys.executable, "-m", "pip", "download", "--quiet", *target, *requirements)
        partial.rename(folder)
    return folder


def run(*command: str, **options: Any) -> str:
    """A program's stdout. Its stderr goes to the test's."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


@dataclass(frozen=True)
class Image:
    """An image that was built, and its files."""

    config: dict[str, Any]
    """The image's configuration (Open Container Initiative): Env, User, Entrypoint and so on."""
    files: Path

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.lstat().st_size for path in self.files.rglob("*") if path.is_file() and not path.is_symlink())

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Starts a program as a confined container does: the image's user and environment, no capabilities, and only
        /tmp writable. The network is the machine's."""
        given = [*self.config["Env"], *(f"{name}={value}" for name, value in env.items())]
        uid, gid = self.config["User"].split(":")
        confined = (
            'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && mount -t tmpfs tmpfs "$0/tmp" && '
            'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" '
            f"setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "
            'env -i "$@"'
        )
        unshare = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        return subprocess.Popen(
            [*unshare, "sh", "-c", confined, str(self.files), *given, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@dataclass(frozen=True)
class Builder:
    """buildah, with a storage of its own."""

    storage: Path

    def buildah(self, *arguments: str) -> str:
        """Runs it."""
        storage = ("--root", str(self.storage / "root"), "--runroot", str(self.storage / "run"))
        return run("buildah", *storage, *arguments).strip()

    def make_base(self) -> None:
        """Makes the image that replaces the Dockerfile's base."""
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(debian_folder()), "/")
        self.buildah("commit", "--quiet", container, BASE)
        self.buildah("rm", container)

    def build(self, target: str, wheels: Path, **args: str) -> Image:
        """Builds a target of the Dockerfile, only from wheels."""
        given = {"PYTHON_IMAGE": BASE, "PIP_ARGS": "--no-index --find-links /wheels", **args}
        name = f"localhost/outrider/{target}"
        self.buildah(
            *("bud", "--quiet", "--isolation", "chroot", "--file", str(DOCKERFILE), "--target", target, "--tag", name),
            *(f"--build-arg={name}={value}" for name, value in given.items()),
            *("--volume", f"{wheels}:/wheels:ro", str(ROOT)),
        )
        config = json.loads(self.buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
        return Image(config, Path(self.buildah("mount", self.buildah("from", name))))
