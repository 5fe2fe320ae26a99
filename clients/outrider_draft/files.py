"""Writes files so that a reader sees the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write; it becomes `path` when the body ends. Raises OSError for what the body
    raises, because libraries raise errors of their own for a disk that is full; `path` is then as it was."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)  # a service may be another user
        os.replace(partial, path)
    except Exception as error:
        raise OSError(f"{path} cannot be written, and is as it was: {_reason(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
