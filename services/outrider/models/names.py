"""Tells what the name of a model stands for, and what is wrong with it, before anything is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from outrider.models.checkpoint import (
    ADAPTER_CONFIG,
    CONFIG,
    DEMO_PREFIX,
    UnknownModel,
    UnsupportedModel,
    judge_config,
    judge_folder,
    read_json,
)
from outrider.models.demo.names import DEMO_FOLDER, demo_folder
from outrider.models.gguf import gguf_in, is_gguf, judge_gguf
from outrider.models.hub import cached_gguf, download, why_no_hub
from outrider.models.wheels import WHEELS, fetch_wheel, path_of


def gguf_of(model_id: str) -> Path | None:
    """Returns the GGUF file on this machine that a model is read from; None if there is none.

    Raises UnsupportedModel if several may be meant."""
    path = Path(model_id)
    if model_id.startswith(DEMO_PREFIX):
        return None
    if model_id in WHEELS:
        return path_of(model_id) if path_of(model_id).is_file() else None
    if path.is_dir():
        return gguf_in(path)
    return path if is_gguf(path) else cached_gguf(model_id)


def is_here(model_id: str) -> bool:
    """Returns True if a model, or its config at least, is on this machine."""
    if model_id.startswith(DEMO_PREFIX) or Path(model_id).is_dir() or gguf_of(model_id) is not None:
        return True
    return model_id not in WHEELS and cached_config(model_id) is not None


def fetch_model(model_id: str, show: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Downloads a model that is not on this machine. Raises what `fetch_wheel` and `download` do."""
    if model_id in WHEELS:
        fetch_wheel(model_id, show)
    else:
        download(model_id, show=show)


def why_no_model(model_id: str) -> str:
    """Returns why a model cannot be served, as far as its name and its files on this machine tell; empty means that it
    may be. The hub's own library would try for half a minute to reach a hub that does not answer."""
    if model_id.startswith(DEMO_PREFIX) and demo_folder(model_id) is None:
        return f"there is no demo model {model_id!r} in {DEMO_FOLDER}"
    try:
        judge_checkpoint(model_id)
        if is_here(model_id) or model_id in WHEELS:
            return ""
    except UnsupportedModel as error:
        return str(error)
    if "/" not in model_id:
        return "no such folder and no demo model; a name on the hub has an owner, like Qwen/Qwen3-0.6B"
    why = why_no_hub()
    return f"the hub cannot be reached ({why}); a folder or a demo name works offline" if why else ""


def judge_checkpoint(model_id: str) -> None:
    """Judges a model by its config and the files next to it. Reads only the headers of the weights.

    Args:
        model_id: A folder, a GGUF file, or a name on the Hugging Face hub. For a name, the files in the hub's cache are
            judged; nothing is fetched. Names of demo models pass.

    Raises:
        UnknownModel: It is written as a path, or cannot be a name on the hub, and there is no such folder.
        UnsupportedModel: The model cannot be served.
    """
    path = Path(model_id)
    if model_id.startswith(DEMO_PREFIX):
        return
    if (file := gguf_of(model_id)) is not None:
        judge_gguf(file)
    elif model_id in WHEELS:
        return
    elif path.is_dir():
        judge_folder(path)
    elif path.is_file():
        raise UnsupportedModel(f"is a file, and no GGUF: the folder is to be given that has {CONFIG}")
    elif not _may_be_on_hub(model_id):
        raise UnknownModel("no such file" if path.suffix == ".gguf" else "no such folder")
    elif (cached := cached_config(model_id)) is not None:
        judge_config(read_json(cached), cached.parent)


def _may_be_on_hub(model_id: str) -> bool:
    """Returns True if a name is not written as a path is: one on the hub has one slash at most."""
    return not model_id.startswith(("/", ".", "~")) and bool(model_id) and model_id.count("/") <= 1


def cached_config(model_id: str) -> Path | None:
    """Returns the config of a model in the hub's cache, or that of an adapter; None if neither is there.

    Raises UnknownModel if it cannot be a name on the hub."""
    name, colon, _ = model_id.partition(":")
    try:
        found = [try_to_load_from_cache(name, each) for each in (CONFIG, ADAPTER_CONFIG)]
    except HFValidationError as error:
        raise UnknownModel("no such folder, and no name on the hub") from error
    return None if colon else next((Path(path) for path in found if isinstance(path, str)), None)


def file_of(model_id: str, name: str) -> Path | None:
    """Returns a small file of a model: a demo model, a folder, or a model on the hub. None if it has no such file."""
    folder = demo_folder(model_id) if model_id.startswith(DEMO_PREFIX) else Path(model_id)
    if folder is not None and folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        cached = try_to_load_from_cache(model_id, name)
        return Path(cached if isinstance(cached, str) else hf_hub_download(model_id, name))
    except (OSError, HFValidationError):
        return None
