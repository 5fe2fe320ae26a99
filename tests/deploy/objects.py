"""Reading rendered objects: pods, selectors, environments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tests.deploy.rendering import Object

NAME = "app.kubernetes.io/name"
HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
SERVICES = {
    "target-verifier": "verifier",
    "draft-speculator": "speculator",
    "retrieval-datastore": "datastore",
    "edge-speculator": "edge",
}
"""Workload of ours -> its Python package, component and container."""


def title(found: Object) -> str:
    """What an object is called in a complaint: Kind/name."""
    return f"{found['kind']}/{found['metadata']['name']}"


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    """The objects of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Iterable[Object], kind: str, name: str) -> Object:
    """The one object of this kind and name. Fails where there is none, or several."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects are {kind}/{name}"
    return found[0]


def workloads(objects: Iterable[Object]) -> list[Object]:
    """What makes pods."""
    return of_kind(objects, "Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")


def services_of_ours(objects: Iterable[Object]) -> list[Object]:
    """The workloads that run a service of ours."""
    return [each for each in workloads(objects) if each["metadata"]["name"] in SERVICES]


def pod_of(workload: Object) -> Object:
    """The template of a workload's pods: metadata and spec."""
    spec = workload["spec"]
    if workload["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: Object = spec["template"]
    return template


def labels_of(workload: Object) -> dict[str, str]:
    """The labels of a workload's pods."""
    return dict(pod_of(workload)["metadata"].get("labels", {}))


def containers_of(workload: Object) -> list[Object]:
    """All containers of a workload's pods, those of the beginning too."""
    spec = pod_of(workload)["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def main_container(workload: Object) -> Object:
    """The container that serves, by the name of its component."""
    wanted = SERVICES.get(workload["metadata"]["name"], workload["metadata"]["name"])
    found: Object
    (found,) = (each for each in pod_of(workload)["spec"]["containers"] if each["name"] == wanted)
    return found


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    unknown = set(selector) - {"matchLabels", "matchExpressions"}
    assert not unknown, f"not part of a selector: {unknown}"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        _expression_holds(each, labels) for each in selector.get("matchExpressions", [])
    )


def _expression_holds(expression: Object, labels: dict[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise AssertionError(f"no operator: {expression}")


def ports_of(workload: Object) -> dict[str, int]:
    """Port name -> number, of all containers of a workload's pods."""
    found: dict[str, int] = {}
    for container in containers_of(workload):
        for port in container.get("ports", []):
            assert port["name"] not in found, f"{title(workload)}: port {port['name']} twice"
            found[port["name"]] = port["containerPort"]
    return found


def port_number(workload: Object, port: int | str) -> int | None:
    """The number of a port given by name or number, if a container has it."""
    ports = ports_of(workload)
    if isinstance(port, str):
        return ports.get(port)
    return port if port in ports.values() else None


def environment_of(container: Object, objects: list[Object]) -> dict[str, str | None]:
    """Variable -> value, or None where only the cluster knows it; `unknown` for such a part of another value.

    Raises KeyError for a ConfigMap's key that is not there.
    """
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        reference = source.get("configMapRef")
        assert reference is not None, f"a whole Secret as environment: {source}"
        data = named(objects, "ConfigMap", reference["name"]).get("data", {})
        found |= {source.get("prefix", "") + key: value for key, value in data.items()}
    for variable in container.get("env", []):
        found[variable["name"]] = _value(variable, objects, found)
    return found


def _value(variable: Object, objects: list[Object], before: dict[str, str | None]) -> str | None:
    if "valueFrom" in variable:
        reference = variable["valueFrom"].get("configMapKeyRef")
        if reference is None:
            return None
        value: str = named(objects, "ConfigMap", reference["name"])["data"][reference["key"]]
        return value
    value = variable.get("value", "")
    referenced = re.findall(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value)
    unknown = [name for name in referenced if name not in before]
    assert not unknown, f"{variable['name']} refers to variables that do not come before it: {unknown}"
    for name in referenced:
        value = value.replace(f"$({name})", before[name] or "unknown")
    return value


def mounts_of(workload: Object, container: Object) -> Iterator[tuple[str, Object]]:
    """Folder in the container, and the volume that is mounted there."""
    volumes = {volume["name"]: volume for volume in pod_of(workload)["spec"].get("volumes", [])}
    for claim in workload["spec"].get("volumeClaimTemplates", []):
        name = claim["metadata"]["name"]
        volumes[name] = {"name": name, "persistentVolumeClaim": {"claimName": name}}
    for mount in container.get("volumeMounts", []):
        yield mount["mountPath"], volumes[mount["name"]]
