"""Kubernetes objects as dicts: where they come from, and what of them is changed for two cores."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from tests.support.manifests import Object, Variant, named, rendered

WORKLOADS = ("Deployment", "StatefulSet")


def shipped() -> list[Object]:
    """The objects that are rolled out: those of the overlay for CPUs."""
    return rendered(Variant("cpu"))


def workloads(objects: Sequence[Object]) -> list[Object]:
    """What makes pods."""
    return [found for found in objects if found["kind"] in WORKLOADS]


def container_of(workload: Object) -> Object:
    """The container of its pods. Raises ValueError for pods that have several."""
    container: Object
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return container


def set_variables(workload: Object, variables: Mapping[str, str]) -> None:
    """Adds variables to the container of its pods, or replaces them."""
    container = container_of(workload)
    kept = [entry for entry in container.get("env", ()) if entry["name"] not in variables]
    container["env"] = kept + [{"name": name, "value": value} for name, value in variables.items()]


def with_secret(objects: Sequence[Object], name: str, **values: str) -> list[Object]:
    """The objects, and a secret unless there is one of that name: it is not in a repository."""
    if any(found["kind"] == "Secret" and found["metadata"]["name"] == name for found in objects):
        return list(objects)
    return [*objects, {"kind": "Secret", "metadata": {"name": name}, "stringData": values}]


def contents(objects: Sequence[Object], kind: str, name: str) -> dict[str, str]:
    """What a ConfigMap or a Secret holds, as text."""
    found = named(objects, kind, name)
    data = dict(found.get("data") or {})
    if kind == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return data | dict(found.get("stringData") or {})
