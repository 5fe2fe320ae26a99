"""Chat templates as texts: facts about a template that need no rendering."""

from __future__ import annotations

import re


def reads_variable(template: str, name: str) -> bool:
    """Returns True if a template reads a variable. It can do so only by the variable's name."""
    return name.isidentifier() and re.search(rf"\b{name}\b", template) is not None
