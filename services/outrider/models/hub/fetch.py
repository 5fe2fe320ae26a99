"""Put a model of the Hugging Face hub into a folder: ``python -m outrider.models.hub.fetch``.

Fetches the files of one commit that loading needs. Each is checked against the hub's own sums, and against a list of
SHA-256 sums if there is one. The folder appears at once when all of it is there and right, with a list of its files
(``SHA256SUMS``, as ``sha256sum --check`` reads it). A second run reads the files again and downloads nothing; an
interrupted run is continued; of several runs at the same time one downloads and the others wait.

With ``--check`` it writes nothing and does not ask the hub: the exit status tells if the model is there and right.

HF_TOKEN is the token for models that need one, HF_ENDPOINT a mirror of the hub.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from outrider.models.hub.checksums import (
    LIST_NAME,
    MissingFiles,
    UnusableList,
    WrongFiles,
    compare,
    compare_names,
    compare_sums,
    files_in,
    format_list,
    parse_list,
    sum_files,
)

FAILED, WRONG_FLAGS, NOT_THERE, WRONG = 1, 2, 3, 4
STATUSES = """exit status:
  0  the model is there, complete and right
  1  the hub or the disk cannot be used now; trying again may help
  2  wrong flags
  3  there is no such model or revision; with --check: it is not there
  4  a file differs from its checksum, or the folder holds something else"""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TITLE = re.compile(r"# (\S+) at ([0-9a-f]{40})")
_POLL_S = 1.0


class Stopped(Exception):
    """Ends the program: holds the reason in one line, and the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says; the exit status is one of `STATUSES`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    is_commit = _COMMIT.fullmatch(options.revision) is not None
    if not (is_commit or options.allow_moving_revision):
        parser.error(
            f"--revision: {options.revision} is no commit (40 hexadecimal digits) and may mean another model tomorrow; "
            "--allow-moving-revision takes it nevertheless"
        )
    if options.wait_s and not options.check:
        parser.error("--wait-s needs --check")
    try:
        sums = _given_list(options.sha256sums)
        if options.check:
            _wait(options.to, options.model, options.revision, sums, options.wait_s)
        else:
            fetch(options.to, options.model, options.revision, sums)
    except Stopped as stop:
        _end(stop.status, str(stop))
    except UnusableList as error:
        _end(WRONG_FLAGS, f"--sha256sums: {options.sha256sums}: {error}")
    except OSError as error:
        _end(FAILED, str(error))
    print(f"{options.to}: {options.model} is complete and right", flush=True)


def fetch(folder: Path, model: str, revision: str, sums: Mapping[str, str] | None = None) -> None:
    """Downloads a model into a folder unless it is there.

    Args:
        folder: It need not exist. The folder that it lies in must be writable: the download grows next to it.
        model: Name on the hub.
        revision: A commit, branch or tag.
        sums: Hex SHA-256 by path, of all files; None means that the hub's sums are enough.

    Raises:
        Stopped: The model is not there, or not right.
        OSError: The disk cannot be used.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with _alone(folder.with_name(f".{folder.name}.lock"), model):
        if _COMMIT.fullmatch(revision) and _is_there(folder, partial, model, revision, sums):
            return
        # All that the library keeps lies in the download's own folder: the root may be read-only. It reads its
        # environment when it is imported, and services are told to stay offline.
        os.environ.update(
            HF_HOME=str(partial / ".cache"),
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
        )
        from outrider.models.hub import repository as hub

        try:
            commit = hub.resolve(model, revision)
            # If the revision is a commit, this was checked above.
            if commit == revision or not _is_there(folder, partial, model, commit, sums):
                _download(partial, model, commit, sums)
                # A rename replaces an empty folder that may be there; `_is_there` has refused or moved any other.
                partial.rename(folder)
        except hub.NoSuchModel as error:
            raise Stopped(NOT_THERE, str(error)) from error
        except hub.HubFailed as error:
            raise Stopped(FAILED, str(error)) from error
        except (hub.SpoiledDownload, WrongFiles) as error:
            _delete(partial, error.paths)
            raise Stopped(WRONG, str(error)) from error


def _download(partial: Path, model: str, commit: str, sums: Mapping[str, str] | None) -> None:
    """Fills the folder with the model's files and their list. Raises what `repository.py` does, WrongFiles."""
    from outrider.models.hub import repository as hub

    files = hub.list_files(model, commit)
    listed = {file.path: file.sha256 for file in files if file.sha256 is not None}
    if sums is not None:  # before gigabytes are downloaded, as far as the hub lists sums
        compare_names([file.path for file in files], sums)
        compare_sums(listed, sums)
    print(f"{model} at {commit}: {len(files)} files, {sum(file.num_bytes for file in files)} bytes", flush=True)
    _clear(partial, {file.path for file in files})
    hub.download(model, commit, files, partial, lambda path: print(f"{path}: downloaded", flush=True))
    # `hub.download` has checked files against the hub's SHA-256 where it lists one: only the others are read again.
    actual = listed | sum_files(partial, [file.path for file in files if file.path not in listed])
    if sums is not None:
        compare_sums(actual, sums)
    (partial / LIST_NAME).write_text(format_list(actual, f"{model} at {commit}"), encoding="utf-8")


def check(folder: Path, model: str, revision: str, sums: Mapping[str, str] | None = None) -> None:
    """Reads every file and raises Stopped unless the folder holds this model, complete and right.

    Without `sums`, files are checked against the folder's own list. A revision that is no commit is not compared with
    the folder's, which would take asking the hub. Raises OSError.
    """
    kept = _kept_list(folder, model, revision)
    if kept is None and not (folder.is_dir() and files_in(folder)):
        raise Stopped(NOT_THERE, f"{folder}: {model} is not there")
    expected = kept if sums is None else sums
    if expected is None:
        raise Stopped(WRONG, f"{folder}: holds files, and there is no list of their checksums")
    try:
        compare(folder, expected)
    except MissingFiles as error:
        raise Stopped(NOT_THERE, f"{folder}: {error}") from error
    except WrongFiles as error:
        raise Stopped(WRONG, f"{folder}: {error}") from error


def _kept_list(folder: Path, model: str, revision: str) -> dict[str, str] | None:
    """Reads the list in the folder; None means there is none. Raises Stopped if it is of another model or commit."""
    path = folder / LIST_NAME
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    title = _TITLE.fullmatch(text.partition("\n")[0])
    if title is None:
        raise Stopped(WRONG, f"{path}: its first line does not name a model and a commit")
    if title[1] != model or (_COMMIT.fullmatch(revision) and title[2] != revision):
        raise Stopped(WRONG, f"{folder}: holds {title[1]} at {title[2]}; take another folder, or delete this one")
    try:
        return parse_list(text)
    except UnusableList as error:
        raise Stopped(WRONG, f"{path}: {error}") from error


def _is_there(folder: Path, partial: Path, model: str, commit: str, sums: Mapping[str, str] | None) -> bool:
    """Returns True if the folder holds the model. A damaged folder is moved away, and its right files are used again.

    Raises Stopped if the folder holds something else.
    """
    kept = _kept_list(folder, model, commit)
    if kept is None:
        if folder.exists() and any(folder.iterdir()):
            raise Stopped(WRONG, f"{folder}: holds files that are not of {model} at {commit}")
        return False
    try:
        compare(folder, kept)
        if sums is not None:
            compare_names(list(kept), sums)
            compare_sums(kept, sums)
    except WrongFiles as error:
        print(f"{folder}: {error}; downloading it again", file=sys.stderr, flush=True)
        # A rename does not replace a folder that is not empty.
        if partial.exists():
            shutil.rmtree(partial)
        folder.rename(partial)
        _delete(partial, error.paths)
        return False
    return True


def _clear(partial: Path, paths: set[str]) -> None:
    """Makes the folder, and leaves in it only these files and the library's state of unfinished downloads."""
    partial.mkdir(exist_ok=True)
    for path in (*files_in(partial), LIST_NAME):
        if path not in paths and not path.startswith(".cache/"):
            (partial / path).unlink(missing_ok=True)


def _delete(partial: Path, paths: Sequence[str]) -> None:
    for path in paths:
        (partial / path).unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path, model: str) -> Iterator[None]:
    """Waits until no other process fetches into the folder. The lock file stays: another process may be waiting for
    it."""
    with lock.open("w") as file:
        # The kernel releases this lock when the process ends, however it ends.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{model}: another process downloads it; waiting", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait(folder: Path, model: str, revision: str, sums: Mapping[str, str] | None, wait_s: float) -> None:
    """Repeats `check` while the model is not there, for at most `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return check(folder, model, revision, sums)
        except Stopped as stop:
            if stop.status != NOT_THERE or time.monotonic() >= until:
                raise
        time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.hub.fetch",
        description="Put one commit of a model on the Hugging Face hub into a folder, and check it.",
        epilog=STATUSES + "\n\nHF_TOKEN and HF_ENDPOINT are the hub's token and address.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="name on the hub, like Qwen/Qwen3-8B")
    parser.add_argument("--revision", required=True, metavar="COMMIT", help="40 hexadecimal digits")
    parser.add_argument(
        "--to", required=True, type=Path, metavar="DIR", help="folder for the model; what it lies in must be writable"
    )
    parser.add_argument(
        "--sha256sums", type=Path, metavar="FILE", help="list of all files, as sha256sum writes it; others are refused"
    )
    parser.add_argument(
        "--allow-moving-revision", action="store_true", help="take a branch or tag: what it means may change"
    )
    parser.add_argument("--check", action="store_true", help="write nothing and ask nobody: only look at what is there")
    parser.add_argument(
        "--wait-s", type=float, default=0.0, metavar="S", help="with --check: wait so long for the model to be there"
    )
    return parser


def _given_list(path: Path | None) -> dict[str, str] | None:
    return None if path is None else parse_list(path.read_text(encoding="utf-8"))


def _end(status: int, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
