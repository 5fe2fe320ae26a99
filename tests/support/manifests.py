"""The manifests of deploy/: rendered by `kubectl kustomize`, parsed, and read object by object."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""
NAME = "app.kubernetes.io/name"
HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
SERVICES = {
    "target-verifier": "verifier",
    "draft-speculator": "speculator",
    "retrieval-datastore": "datastore",
    "edge-speculator": "edge",
    "gateway": "gateway",
}
"""Workload of ours -> its Python package, component and container."""
IN_PROCESS = "in-process"
"""The component that runs both models in one process, and removes the speculator."""


OTHER_GPUS = ("amd", "mig")
"""Components that name another resource than whole GPUs of NVIDIA, each instead of `dra`."""
POOLED = "inference-pool"
"""The component that gives each verifier's pod a gateway of its own."""


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
    """Every overlay; every component alone on top of `gpu`; all of them together, and with one process for both models.
    The demo is no part of `gpu`."""
    yield from map(Variant, overlays())
    everything = gpu_with(*(name for name in components() if name not in ("demo", IN_PROCESS, *OTHER_GPUS)))
    yield from (Variant("gpu", (name,)) for name in (*everything.components, IN_PROCESS, *OTHER_GPUS))
    yield everything
    # After the others, as the component itself requires.
    yield Variant("gpu", (*everything.components, IN_PROCESS))


def gpu_with(*names: str) -> Variant:
    """Overlay `gpu` with these components; those that it already has are not repeated."""
    return Variant("gpu", tuple(name for name in names if name not in components_of("gpu")))


@functools.cache
def components_of(overlay: str) -> frozenset[str]:
    """Names of the components that an overlay has, indirectly too."""
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
            # Images come last, as in the overlays: they name the versions of everything above.
            "components": [str(root / "components" / name) for name in (*variant.components, "images")],
        }
        Path(temporary, "kustomization.yaml").write_text(yaml.safe_dump(composition), encoding="utf-8")
        return kustomized(Path(temporary))


def kustomized(folder: Path) -> str:
    """The output of kustomize for a folder. Fails with its message if it refuses."""
    done = subprocess.run([*_kustomize(), str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    assert not done.stderr, f"{folder}: {done.stderr}"  # warnings of deprecation
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
    """Ends a test that lacks a tool: it is skipped, but fails in continuous integration."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"required in CI: {what}")
    pytest.skip(what)


class _Loader(yaml.SafeLoader):
    """Refuses a duplicate key, which YAML forbids. PyYAML takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def parsed(text: str) -> Iterator[Object]:
    """The documents of a YAML text that are not empty. Raises yaml.YAMLError, also for a duplicate key."""
    return (document for document in yaml.load_all(text, _Loader) if document is not None)


def title(found: Object) -> str:
    """The name of an object in a complaint: Kind/name."""
    return f"{found['kind']}/{found['metadata']['name']}"


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    """The objects of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Iterable[Object], kind: str, name: str) -> Object:
    """The only object of this kind and name. Fails if there is none, or several."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects are {kind}/{name}"
    return found[0]


def workloads(objects: Iterable[Object]) -> list[Object]:
    """Objects that make pods."""
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
    """All containers of a workload's pods, init containers included."""
    spec = pod_of(workload)["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def main_container(workload: Object) -> Object:
    """The container that serves; its name is the component's."""
    wanted = SERVICES.get(workload["metadata"]["name"], workload["metadata"]["name"])
    found: Object
    (found,) = (each for each in pod_of(workload)["spec"]["containers"] if each["name"] == wanted)
    return found


def num_gpus(resources: Object) -> int:
    """The GPUs, or slices of one, that a container's limits name."""
    return sum(n for name, n in resources.get("limits", {}).items() if name.startswith(("nvidia.com/", "amd.com/")))


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """True if a label selector matches; an empty one matches everything."""
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
    """Variable -> value, or None if only the cluster knows it; `unknown` stands for such a part of another value.

    Raises KeyError if a ConfigMap lacks the key.
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
