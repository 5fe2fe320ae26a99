"""Puts a model into the cache of the Hugging Face hub: ``python -m outrider.models.hub.cache NAME``.

Prints a line a second on stdout: bytes that are there, of how many. Prints nothing if the cache has the model, or if
the hub cannot be asked: loading the model reports that better. Continues an earlier run.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils.tqdm import tqdm

from outrider.models.checkpoint import CONFIGS, WEIGHTS, WEIGHTS_INDEX, UnsupportedModel, judge_checkpoint
from outrider.models.hub.repository import NEEDED, why_no_hub

PERIOD_S = 1.0


def has_weights(model: str) -> bool:
    """Returns True if the cache has all weights of a model."""
    if isinstance(try_to_load_from_cache(model, WEIGHTS), str):
        return True
    index = try_to_load_from_cache(model, WEIGHTS_INDEX)
    if not isinstance(index, str):
        return False
    shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return all(isinstance(try_to_load_from_cache(model, shard), str) for shard in shards)


def download(model: str) -> None:
    """Downloads the files that loading reads, and prints a line a second. Raises what the library does. Raises
    UnsupportedModel as soon as the config is there, before anything else is downloaded."""
    wanted = list(NEEDED)
    listed = snapshot_download(model, allow_patterns=wanted, dry_run=True)
    missing = [file for file in listed if file.will_download]
    total = sum(file.file_size or 0 for file in missing)
    print(f"0 {total}", flush=True)
    snapshot_download(model, allow_patterns=CONFIGS)
    judge_checkpoint(model)
    due, num_bytes = time.monotonic() + PERIOD_S, 0

    class Counted(tqdm):
        """Counts the bytes of all files, in place of the library's progress bars."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            self._counts = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # it has no types

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal due, num_bytes
            if self._counts:
                num_bytes += int(n or 0)
                if time.monotonic() >= due:
                    due = time.monotonic() + PERIOD_S
                    print(f"{num_bytes} {total}", flush=True)
            return None

    snapshot_download(model, allow_patterns=wanted, tqdm_class=Counted)
    print(f"{total} {total}", flush=True)


def main() -> None:
    """Downloads the model that the command line names, unless the cache has it."""
    (model,) = sys.argv[1:]
    if not (has_weights(model) or constants.HF_HUB_OFFLINE or why_no_hub()):
        with suppress(UnsupportedModel):
            download(model)


if __name__ == "__main__":
    main()
