"""Every object fits its API, without unknown fields: Kubernetes' own, oldest and newest, and custom ones."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support.manifests import Object, missing, title

pytestmark = pytest.mark.slow

OLDEST, NEWEST = "1.30", "1.37"
OLDEST_WITH_CLAIMS = "1.34"
"""The first version that has resource.k8s.io/v1, which objects with a claim need."""

UNTYPED = "inference.networking.k8s.io"
"""A group of custom resources whose types no package has."""

VALIDATE_CUSTOM = Path(__file__).with_name("validate_custom.js")


def is_custom(found: Object) -> bool:
    """True if an object is none of Kubernetes' own, whose groups have no dot or end in k8s.io."""
    group, slash, _ = found["apiVersion"].partition("/")
    own = not slash or "." not in group or (group.endswith(".k8s.io") and ".networking." not in group)
    return not own


def complaints_of_kubernetes(objects: list[Object]) -> list[str]:
    """Errors of the oldest and the newest version for objects that are used together."""
    has_claims = any(each["apiVersion"].startswith("resource.k8s.io/") for each in objects)
    versions = (OLDEST_WITH_CLAIMS if has_claims else OLDEST, NEWEST)
    return [line for each in objects for line in _complaints(json.dumps(each), versions)]


@functools.cache
def _complaints(text: str, versions: tuple[str, ...]) -> list[str]:
    """Cached: most objects are the same in several variants."""
    found, complaints = json.loads(text), []
    for version in versions:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(step) for step in error.path)
            complaints.append(f"{title(found)} in {version}: {where}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            complaints.append(f"{title(found)}: {error.message}")
    return complaints


def complaints_of_custom(objects: list[Object]) -> list[str]:
    """Errors of custom resources, by the types of their projects."""
    folders = [Path(folder, "@kubernetes-models") for folder in os.environ.get("NODE_PATH", "").split(os.pathsep)]
    packages = ("cert-manager", "gateway-api", "keda", "prometheus-operator")
    if shutil.which("node") is None or not any(all((f / package).is_dir() for package in packages) for f in folders):
        missing("node with @kubernetes-models (in NODE_PATH) is not installed: .ci/run installs it")
    done = subprocess.run(
        ["node", str(VALIDATE_CUSTOM)],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answers = json.loads(done.stdout)
    pairs = zip(objects, answers, strict=True)
    return [f"{title(found)}: {complaint}" for found, complaints in pairs for complaint in complaints]


def test_kubernetes_takes_every_object(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_kubernetes([each for each in objects if not is_custom(each)])) == ""


def test_their_projects_take_every_custom_resource(objects: list[Object]) -> None:
    custom = [each for each in objects if is_custom(each) and not each["apiVersion"].startswith(UNTYPED)]
    assert "\n".join(complaints_of_custom(custom)) == ""
