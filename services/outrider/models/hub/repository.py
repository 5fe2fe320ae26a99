"""Models on the Hugging Face hub: lists a model's files at a commit, and downloads them, checked against the hub's own
sums."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from outrider.models.checkpoint import CONFIG, WEIGHTS, WEIGHTS_INDEX

COMMIT = re.compile(r"[0-9a-f]{40}")
NEEDED = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    WEIGHTS,
    "model-?????-of-?????.safetensors",
)
"""Files at the top of a repository that loading reads. Weights in other formats are left out: pickles can run code, and
some repositories hold the same weights twice."""

_NUM_THREADS = 4
HUB_TIMEOUT_S = 5.0


def why_no_hub() -> str:
    """Returns why no connection to the hub can be made; empty means that it can, or that a proxy would make it."""
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in getproxies():
        return ""
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), HUB_TIMEOUT_S).close()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


class NoSuchModel(Exception):
    """The hub has no such model or revision, or this token has no access to it, or the model cannot be loaded from
    safetensors."""


class HubFailed(Exception):
    """The hub cannot be reached or answers nonsense; trying again may help."""


class SpoiledDownload(Exception):
    """A file does not match what the hub, or another file, says of it. `paths` names what to delete, relative to the
    folder."""

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.paths = paths


@dataclass(frozen=True)
class HubFile:
    """A file of a model at a commit."""

    path: str
    num_bytes: int
    blob_id: str
    """Git's name of the content; for weights the name of a pointer to them."""
    sha256: str | None
    """Hex; None for files that are stored in git itself."""


def resolve(model: str, revision: str) -> str:
    """Returns the commit that a branch or tag means now. Raises NoSuchModel, HubFailed."""
    if COMMIT.fullmatch(revision):
        return revision
    with _one_line_errors(model, revision):
        commit = HfApi().model_info(model, revision=revision).sha
    if commit is None:
        raise HubFailed(f"the hub does not say which commit {revision} of {model} is")
    return commit


def list_files(model: str, commit: str) -> list[HubFile]:
    """Returns the files that loading needs. Raises NoSuchModel, HubFailed."""
    with _one_line_errors(model, commit):
        # Not recursive: loading reads nothing below the top.
        entries = list(HfApi().list_repo_tree(model, revision=commit))
    files = [
        HubFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs is not None else None)
        for entry in entries
        if isinstance(entry, RepoFile) and any(fnmatchcase(entry.path, pattern) for pattern in NEEDED)
    ]
    paths = {file.path for file in files}
    if CONFIG not in paths:
        raise NoSuchModel(f"{model} at {commit} has no {CONFIG}")
    if WEIGHTS not in paths and WEIGHTS_INDEX not in paths:
        raise NoSuchModel(f"{model} at {commit} has no weights as safetensors, and others are not loaded")
    return sorted(files, key=lambda file: file.path)


def download(model: str, commit: str, files: Sequence[HubFile], folder: Path, report: Callable[[str], None]) -> None:
    """Puts the files into the folder, checks each against the hub's sum, and reports their paths as they arrive.

    Files that an earlier attempt has left there are used.

    Raises NoSuchModel, HubFailed, SpoiledDownload, OSError.
    """

    def one(file: HubFile) -> None:
        with _one_line_errors(model, commit):
            hf_hub_download(model, file.path, revision=commit, local_dir=folder)
        _check(folder / file.path, file)
        report(file.path)

    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        for _ in pool.map(one, files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    _check_weights(folder)
    shutil.rmtree(folder / ".cache")


def _check_weights(folder: Path) -> None:
    """Raises NoSuchModel unless all weights that the folder's index names are there."""
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoSuchModel(f"{WEIGHTS_INDEX} is no index of weights") from error
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise NoSuchModel(f"{missing[0]} is named in {WEIGHTS_INDEX}, and the hub does not have it")


def _check(path: Path, file: HubFile) -> None:
    """Raises SpoiledDownload unless the file is what the hub lists."""
    with path.open("rb") as content:
        if file.sha256 is not None:
            name, expected, actual = "SHA-256", file.sha256, hashlib.file_digest(content, "sha256").hexdigest()
        else:
            # Git names a blob by the SHA-1 of this header and its content.
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
            digest.update(content.read())
            name, expected, actual = "git's sum", file.blob_id, digest.hexdigest()
    if actual != expected:
        raise SpoiledDownload(f"{file.path}: {name} is {actual}, and the hub says {expected}", (file.path,))


@contextmanager
def _one_line_errors(model: str, revision: str) -> Iterator[None]:
    """Turns the library's errors, which have several lines, into ours, which have one."""
    try:
        yield
    except HFValidationError as error:
        raise NoSuchModel(f"{model} is no name of a model on the hub") from error
    # In this order: a GatedRepoError is a RepositoryNotFoundError, that is an HfHubHTTPError, and that is an OSError.
    except GatedRepoError as error:
        raise NoSuchModel(f"{model} is gated: HF_TOKEN must be of somebody who has accepted its terms") from error
    except RevisionNotFoundError as error:
        raise NoSuchModel(f"{model} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise NoSuchModel(f"the hub has no model {model}, or not for this HF_TOKEN") from error
    except (HfHubHTTPError, httpx2.HTTPError, LocalEntryNotFoundError) as error:
        raise HubFailed(f"{model} cannot be read from the hub: {_first_line(error)}") from error
    except OSError as error:
        if error.errno is not None:  # the disk's own
            raise
        raise HubFailed(f"{model} has not arrived whole: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
