"""deploy/ has no secret: not as an object, not as a literal, not in a variable."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.manifests import (
    DEPLOY,
    Object,
    containers_of,
    of_kind,
    parsed,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

TELLING = re.compile(r"password|passwd|token|secret|api_?key|private_?key|credential", re.I)
"""A variable with such a name has a secret, or the path of one."""
VALUE = re.compile(
    r"://[^/\s:@]*:(?!PASSWORD@)[^/\s@$]+@"  # a URL with a password that is no $(VARIABLE) and no placeholder
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(hf_|ghp_|glpat-|sk-|AKIA)[A-Za-z0-9_-]{16,}"
)


def complaints_of_secrets(objects: list[Object]) -> list[str]:
    """Secrets with values, variables with a secret's name and a literal, and anything that looks like a secret."""
    complaints = []
    for each in of_kind(objects, "Secret"):
        complaints += [f"{title(each)} has values"] if each.get("data") or each.get("stringData") else []
    for each in workloads(objects):
        for container in containers_of(each):
            for variable in container.get("env", []):
                value = variable.get("value", "")
                if TELLING.search(variable["name"]) and value and not value.startswith(("/", "$(")):
                    complaints.append(f"{title(each)}: {variable['name']} is {value!r}")
    for each in objects:
        complaints += [f"{title(each)}: has a secret" for text in _texts(each) if VALUE.search(text)]
    return complaints


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value


def test_no_object_has_a_secret(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_secrets(objects)) == ""


def test_no_kustomization_generates_one() -> None:
    for path in DEPLOY.rglob("kustomization.yaml"):
        (kustomization,) = parsed(path.read_text(encoding="utf-8"))
        assert "secretGenerator" not in kustomization, path


def test_no_file_looks_like_one() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not VALUE.search(path.read_text(encoding="utf-8")), path
