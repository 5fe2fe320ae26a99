"""Docstrings speak in sentences: their first line has a subject and a verb, or is an imperative with its object."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("services", "clients")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "services" / "outrider" / "v1")
)

FRAGMENT = re.compile(r"(What|Whether|How|Of|Who|Whose|Which|Why|Where|By|None =)\b")
"""A first word after which no sentence comes: "What a session sends", "Whether it runs"."""


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Name and docstring of everything in a file that has one: itself, classes, functions, and what is assigned."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "name", "the file itself"), text
            for before, statement in itertools.pairwise(node.body):
                match before, statement:
                    case ast.Assign(targets=[target]) | ast.AnnAssign(target=target), ast.Expr(ast.Constant(str(text))):
                        yield ast.unparse(target), text


def fragments(path: Path) -> list[str]:
    """What begins with a fragment in a file, and the fragments."""
    return [f"{name}: {text.splitlines()[0]}" for name, text in docstrings(path) if FRAGMENT.match(text)]


@pytest.mark.parametrize("package", sorted({path.relative_to(ROOT).parts[1] for path in SOURCES}))
def test_docstrings_begin_with_a_sentence(package: str) -> None:
    wrong = {
        path.relative_to(ROOT).as_posix(): found
        for path in SOURCES
        if path.relative_to(ROOT).parts[1] == package and (found := fragments(path))
    }
    assert not wrong


def test_a_fragment_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    good = 'def f() -> None:\n    """Returns what it has."""\n'
    file.write_text(f'"""What a file has."""\n\nX = 1\n"""Of a file."""\n\n\n{good}', encoding="utf-8")
    assert fragments(file) == ["the file itself: What a file has.", "X: Of a file."]
