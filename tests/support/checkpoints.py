"""Files of a model that does not exist: in a folder, or under a name in the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    """Writes files into a folder: bytes as they are, anything else as JSON. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def in_cache(cache: Path, model_id: str, files: Mapping[str, Any]) -> None:
    """Puts files of a model into a cache of the hub."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    write(folder / "snapshots" / COMMIT, files)
    write(folder / "refs", {"main": COMMIT.encode()})
