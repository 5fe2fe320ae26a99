"""What deploy/ renders to: `kubectl kustomize`, parsed."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""


@dataclass(frozen=True)
class Variant:
    """An overlay, and components on top of it that it does not have."""

    overlay: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.overlay, *self.components))


def overlays() -> list[str]:
    """Names of the overlays."""
    return sorted(path.parent.name for path in DEPLOY.glob("overlays/*/kustomization.yaml"))


def components() -> list[str]:
    """Names of the components."""
    return sorted(path.parent.name for path in DEPLOY.glob("components/*/kustomization.yaml"))


def variants() -> Iterator[Variant]:
    """Every overlay; every component alone on top of `gpu`; all of them there. The demo is no part of `gpu`."""
    yield from map(Variant, overlays())
    everything = gpu_with(*(name for name in components() if name != "demo"))
    yield from (Variant("gpu", (name,)) for name in everything.components)
    yield everything


def gpu_with(*names: str) -> Variant:
    """Overlay `gpu` with these components, those that it has already and others."""
    return Variant("gpu", tuple(name for name in names if name not in components_of("gpu")))


@functools.cache
def components_of(overlay: str) -> frozenset[str]:
    """Names of the components that an overlay has, through other folders too."""
    found: set[str] = set()
    folders = [DEPLOY / "overlays" / overlay]
    while folders:
        folder = folders.pop()
        if folder.parent == DEPLOY / "components":
            found.add(folder.name)
        (kustomization,) = parsed((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        entries = [*kustomization.get("resources", []), *kustomization.get("components", [])]
        folders += [(folder / entry).resolve() for entry in entries if (folder / entry).is_dir()]
    return frozenset(found)


def rendered(variant: Variant) -> list[Object]:
    """The objects of a variant; the caller may change them."""
    return copy.deepcopy(_rendered(variant))


@functools.cache
def _rendered(variant: Variant) -> list[Object]:
    return list(parsed(rendered_text(variant)))


def rendered_text(variant: Variant) -> str:
    """What a variant renders to, as YAML."""
    if not variant.components:
        return kustomized(DEPLOY / "overlays" / variant.overlay)
    with tempfile.TemporaryDirectory() as temporary:
        # Kustomize takes no absolute paths.
        root = Path(os.path.relpath(DEPLOY, Path(temporary).resolve()))
        composition = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [str(root / "overlays" / variant.overlay)],
            # Images come last, as in the overlays: they name the versions of all that is above.
            "components": [str(root / "components" / name) for name in (*variant.components, "images")],
        }
        Path(temporary, "kustomization.yaml").write_text(yaml.safe_dump(composition), encoding="utf-8")
        return kustomized(Path(temporary))


def kustomized(folder: Path) -> str:
    """What kustomize makes of a folder. Fails with its words where it refuses."""
    done = subprocess.run([*_kustomize(), str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    assert not done.stderr, f"{folder}: {done.stderr}"  # what is deprecated
    return done.stdout


@functools.cache
def _kustomize() -> tuple[str, ...]:
    kubectl = os.environ.get("OUTRIDER_KUBECTL") or shutil.which("kubectl")
    if kubectl is not None:
        return kubectl, "kustomize"
    kustomize = shutil.which("kustomize")
    if kustomize is None:
        missing("kubectl or kustomize is not installed (.ci/install-kubectl)")
    return kustomize, "build"


def missing(what: str) -> NoReturn:
    """Ends a test that lacks a tool: skipped, and failed in continuous integration."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"required in CI: {what}")
    pytest.skip(what)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, which YAML forbids and PyYAML takes the last of."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def parsed(text: str) -> Iterator[Object]:
    """The documents of a YAML text that are not empty. Raises yaml.YAMLError, also for a key that is given twice."""
    return (document for document in yaml.load_all(text, _Loader) if document is not None)
