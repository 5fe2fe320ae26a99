"""Tells what the name of a model stands for, and what is wrong with it, before anything is loaded. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from outrider.models.checkpoint import DEMO_PREFIX, UnsupportedModel, cached_config, judge_checkpoint
from outrider.models.demo.names import DEMO_FOLDER, demo_folder
from outrider.models.hub import why_no_hub


def is_here(model_id: str) -> bool:
    """Returns True if the config of a model is on this machine."""
    return model_id.startswith(DEMO_PREFIX) or Path(model_id).is_dir() or cached_config(model_id) is not None


def why_no_model(model_id: str) -> str:
    """Returns why a model cannot be served, as far as its name and its files on this machine tell; empty means that it
    may be. The hub's own library would try for half a minute to reach a hub that does not answer."""
    if model_id.startswith(DEMO_PREFIX) and demo_folder(model_id) is None:
        return f"there is no demo model {model_id!r} in {DEMO_FOLDER}"
    try:
        judge_checkpoint(model_id)
    except UnsupportedModel as error:
        return str(error)
    if is_here(model_id):
        return ""
    if "/" not in model_id:
        return "no such folder and no demo model; a name on the hub has an owner, like Qwen/Qwen3-0.6B"
    why = why_no_hub()
    return f"the hub cannot be reached ({why}); a folder or a demo name works offline" if why else ""


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
