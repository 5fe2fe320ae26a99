"""Packages that outrider without extras leaves out: a service that lacks one says which extra brings it.

Standard library only: this is imported before anything that may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Ends the process with one line if an import in the block fails for want of another project's package.

    Args:
        extra: The extra of this project that brings what is imported in the block.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "outrider"):
            raise  # a module of ours: a bug, and no extra brings it
        raise SystemExit(f"error: {missing} is not installed: pip install -e '.[{extra}]'") from None
