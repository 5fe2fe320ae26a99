"""Rules for the files and everything that they render to: no dead file, one namespace, names and labels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.manifests import (
    DEPLOY,
    NAME,
    SERVICES,
    Object,
    Variant,
    components,
    labels_of,
    main_container,
    of_kind,
    overlays,
    parsed,
    rendered,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

NOT_NAMESPACED = {"Namespace", "PriorityClass", "DeviceClass", "ClusterIssuer", "ClusterRole", "ClusterRoleBinding"}
ELSEWHERE = {
    "vllm",
    "README.md",
    "Dockerfile",
    "requirements.py",
    "compose.yaml",
    "compose.gpu.yaml",
    ".checkov.yaml",
    "chart",
}
"""Files in deploy/ that belong to no kustomization."""
WORKLOADS = {
    "cpu": {"target-verifier", "draft-speculator", "retrieval-datastore", "redis", "gateway"},
    "gpu": {"target-verifier", "draft-speculator", "retrieval-datastore", "redis", "gateway"},
    "one-gpu": {"target-verifier", "retrieval-datastore", "redis", "gateway"},
    "external-redis": {"target-verifier", "draft-speculator", "retrieval-datastore", "gateway"},
    "cloud": {"target-verifier", "retrieval-datastore", "redis"},
    "edge": {"edge-speculator"},
}
"""Overlay -> the workloads of Outrider that it has."""


def complaints_of_names(objects: list[Object]) -> list[str]:
    """Objects rendered twice or outside the namespace, workloads without the common names and labels."""
    identities = Counter((each["apiVersion"].partition("/")[0], title(each)) for each in objects)
    complaints = [f"{name} is there {count} times" for (_, name), count in identities.items() if count > 1]
    for each in objects:
        namespace = each["metadata"].get("namespace")
        if each["kind"] in NOT_NAMESPACED:
            complaints += [f"{title(each)} has a namespace"] if namespace else []
        elif namespace != "outrider":
            complaints.append(f"{title(each)} is in namespace {namespace}")
    for each in workloads(objects):
        name = each["metadata"]["name"]
        if name not in {*SERVICES, "redis"}:
            continue
        expected = {NAME: name, "app.kubernetes.io/component": SERVICES.get(name, name)}
        expected |= {"app.kubernetes.io/part-of": "outrider"}
        for where, labels in (("its", each["metadata"].get("labels", {})), ("its pods'", labels_of(each))):
            wrong = {key: value for key, value in expected.items() if labels.get(key) != value}
            complaints += [f"{title(each)}: {where} labels lack {wrong}"] if wrong else []
        if each["spec"]["selector"] != {"matchLabels": {NAME: name}}:
            complaints.append(f"{title(each)}: selects by {each['spec']['selector']}")
    return complaints


def complaints_of_commands(objects: list[Object]) -> list[str]:
    """Containers that are not started as `python -m` and their package, with everything else in the environment."""
    complaints = []
    for each in workloads(objects):
        package = SERVICES.get(each["metadata"]["name"])
        if package is None:
            continue
        container = main_container(each)
        module = "outrider_gateway" if package == "gateway" else f"outrider.{package}"
        if container.get("command") != ["python", "-m", module] or container.get("args"):
            complaints.append(f"{title(each)}: {container.get('command')} {container.get('args', '')}")
    return complaints


def referenced_files() -> set[Path]:
    """Every file below deploy/ that a kustomization names, kustomizations included, beginning at overlays and
    components."""
    folders = [DEPLOY / "overlays" / name for name in overlays()] + [
        DEPLOY / "components" / name for name in components()
    ]
    found: set[Path] = set()
    while folders:
        folder = folders.pop()
        path = folder / "kustomization.yaml"
        if path in found:
            continue
        found.add(path)
        (kustomization,) = parsed(path.read_text(encoding="utf-8"))
        for entry in _entries(kustomization):
            target = (folder / entry).resolve()
            if target.is_dir():
                folders.append(target)
            elif target.is_file():
                found.add(target)
    return found


def _entries(kustomization: Object) -> list[str]:
    """Every string of a kustomization that may be a path: KEY=path in generators, too."""
    found, values = [], list(kustomization.values())
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and "\n" not in value:
            found.append(value.rpartition("=")[2])
    return found


def test_there_are_the_overlays_and_the_components_of_the_design() -> None:
    assert set(overlays()) >= set(WORKLOADS)
    assert set(components()) >= {"tls", "network-policies", "keda", "monitoring", "tracing", "models", "dra"}


def test_everything_renders(variant: Variant) -> None:
    assert rendered(variant)


@pytest.mark.parametrize("overlay", WORKLOADS)
def test_an_overlay_has_its_workloads(overlay: str) -> None:
    names = {each["metadata"]["name"] for each in workloads(rendered(Variant(overlay)))}
    assert names & {*SERVICES, "redis"} == WORKLOADS[overlay]


def test_names_and_labels_are_the_common_ones(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_names(objects)) == ""


def test_services_are_started_by_their_module_alone(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_commands(objects)) == ""


def test_the_namespace_has_pod_security_restricted(objects: list[Object]) -> None:
    (namespace,) = of_kind(objects, "Namespace")
    assert namespace["metadata"]["name"] == "outrider"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_file_is_referenced_by_a_kustomization() -> None:
    files = {path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    kustomized = {path for path in files if path.relative_to(DEPLOY).parts[0] in ("base", "components", "overlays")}
    documents = {path for path in kustomized if path.suffix == ".md" or path.name.endswith(".example")}
    assert sorted(kustomized - documents - referenced_files()) == []
    unknown = {path.relative_to(DEPLOY).parts[0] for path in files - kustomized} - ELSEWHERE
    assert sorted(unknown) == []


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_no_file_gives_a_key_twice(path: Path) -> None:
    assert list(parsed(path.read_text(encoding="utf-8")))
