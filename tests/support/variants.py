"""Ways to draft: every method, with chains and with trees, with retrieval in addition and from each source."""

from __future__ import annotations

from typing import Any

from outrider.core.methods import METHODS, OFF

VARIANTS = (
    "off",
    *(method.name for method in METHODS.values() if method is not OFF),
    "pearl+retrieval",
    "best-first+retrieval",
    *(f"{method.name} tree" for method in METHODS.values() if method.has_draft_model),
    "retrieval tree",
    *(f"retrieval+{source}{rows}" for source in ("recycled", "pool") for rows in ("", " tree")),
    "pearl+recycled",
    "best-first+pool,recycled,dynamic tree",
)
"""A method, `+retrieval` or `+` its sources if continuations are retrieved, ` tree` if it verifies trees."""


def options_of(variant: str) -> dict[str, Any]:
    """Returns the options of `generate` for one of them."""
    name, _, rows = variant.partition(" ")
    base, _, retrieval = name.partition("+")
    return {
        "method": base,
        "rows": rows or ("chain" if METHODS[base].has_draft_model else None),
        "retrieval": True if retrieval else None,
        "sources": retrieval.split(",") if retrieval not in ("", "retrieval") else None,
    }
