"""Lists of SHA-256 sums, in the format of `sha256sum`, and the comparison of a folder with one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

LIST_NAME = "SHA256SUMS"
"""Name under which a folder holds the list of its files. The list does not contain itself."""

# A star marks a file that `sha256sum --binary` has read.
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_NUM_THREADS = 4
"""Hashing releases the interpreter's lock. More threads than this would wait for the disk."""


class UnusableList(ValueError):
    """The text is no list of checksums."""


class WrongFiles(Exception):
    """A folder does not match a list.

    Attributes:
        paths: Files that should not be there, or not as they are, relative to the folder.
    """

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.paths = paths


class MissingFiles(WrongFiles):
    """A file in the list is missing."""


def parse_list(text: str) -> dict[str, str]:
    """Reads hex SHA-256 sums by relative path. Lines that begin with # are comments, as for `sha256sum --check`.

    Raises UnusableList, which names the line.
    """
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UnusableList(f"line {number} is not a SHA-256 sum, two spaces and a file name")
        path = match[2].removeprefix("./")  # as in a list made with `find . -type f`
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise UnusableList(f"line {number}: {path} leads out of the folder")
        if sums.setdefault(path, match[1].lower()) != match[1].lower():
            raise UnusableList(f"line {number}: {path} is listed twice, with different sums")
    if not sums:
        raise UnusableList("it lists no file")
    return sums


def format_list(sums: Mapping[str, str], comment: str) -> str:
    """Formats a list that `parse_list` and `sha256sum --check` read."""
    return "".join((f"# {comment}\n", *(f"{sums[path]}  {path}\n" for path in sorted(sums))))


def sum_files(folder: Path, paths: list[str]) -> dict[str, str]:
    """Computes the hex SHA-256 of files, by path relative to the folder. Raises OSError."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return dict(zip(paths, pool.map(lambda path: _sum(folder / path), paths), strict=True))


def files_in(folder: Path) -> list[str]:
    """Returns the paths of all files but the list, relative to the folder, sorted."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != LIST_NAME)


def compare_names(found: list[str], sums: Mapping[str, str]) -> None:
    """Raises WrongFiles or MissingFiles, which names a file, unless the list has exactly these files."""
    unlisted = sorted(set(found) - set(sums))
    if unlisted:
        raise WrongFiles(f"{_some(unlisted)}: not in the list of checksums", tuple(unlisted))
    missing = sorted(set(sums) - set(found))
    if missing:
        raise MissingFiles(f"{_some(missing)}: in the list of checksums, but missing")


def compare_sums(actual: Mapping[str, str], sums: Mapping[str, str]) -> None:
    """Raises WrongFiles, which names a file, unless all of these sums are those of the list."""
    differing = [path for path in sorted(actual) if actual[path] != sums[path]]
    if differing:
        path = differing[0]
        raise WrongFiles(
            f"{_some(differing)}: the SHA-256 is {actual[path]}, and the list says {sums[path]}", tuple(differing)
        )


def compare(folder: Path, sums: Mapping[str, str]) -> None:
    """Raises WrongFiles or MissingFiles, which names a file, unless the folder holds exactly the files of the list.

    Every file is read. Raises OSError.
    """
    found = files_in(folder)
    compare_names(found, sums)
    compare_sums(sum_files(folder, found), sums)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _some(paths: list[str]) -> str:
    """Names the first path, and the number of other paths."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} (and {len(paths) - 1} more)"
