"""Packages that only extras of outrider install: a service that lacks one says which extra has it.

Standard library only: this is imported before anything that may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Ends the process with one line if an import in the block fails because another project's package is missing.

    Args:
        extra: The extra of this project that installs what the block imports.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "outrider"):
            raise  # a module of ours: a bug, which no extra fixes
        raise SystemExit(f"error: {missing} is not installed: pip install -e '.[{extra}]'") from None
