"""Prints the packages that the project needs with some of its extras, one a line: ``python requirements.py EXTRA...``.

Images install them before the project itself, so that a new version of the project is a small new layer on the same
packages.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """The requirements of a pyproject.toml's [project]. Raises KeyError for an extra that it does not have."""
    yield from project["dependencies"]
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            if re.match(rf"{project['name']}\b", requirement):
                raise ValueError(f"extra {extra} is made of other extras: name those")
            yield requirement


if __name__ == "__main__":
    pyproject = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(requirements(pyproject["project"], sys.argv[1:])))
