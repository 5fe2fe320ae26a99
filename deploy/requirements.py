"""Prints the packages that the project needs with some of its extras, one a line: ``python requirements.py EXTRA...``.

Images install them before the project itself, so that a new version of the project is a small new layer on the same
packages.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Returns the requirements of a project with some of its extras, each once; extras of extras are followed.

    Args:
        project: The table [project] of a pyproject.toml.
        extras: Names of extras. Raises KeyError for one that the project does not have.
    """
    found = dict.fromkeys(project["dependencies"])
    waiting = list(extras)
    for extra in waiting:
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if own is None:
                found[requirement] = None
            else:  # the project itself, with other extras: pip must not look for it anywhere
                waiting += [name for name in own[1].split(",") if name not in waiting]
    return list(found)


if __name__ == "__main__":
    pyproject = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    print("\n".join(requirements(pyproject["project"], sys.argv[1:])))
