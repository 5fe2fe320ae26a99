"""Chat templates as texts: what can be told of one without rendering it."""

from __future__ import annotations

import re


def reads_variable(template: str, name: str) -> bool:
    """Returns True if a template reads a variable. It does so by writing its name: there is no other way to get at
    one."""
    return name.isidentifier() and re.search(rf"\b{name}\b", template) is not None
