"""Every container has minimal privileges: no root, no writable image, no capabilities, no token, bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.manifests import Object, containers_of, main_container, named, pod_of, title, workloads

pytestmark = pytest.mark.slow

VOLUMES = {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "csi"}


def complaints_of_security(objects: list[Object]) -> list[str]:
    """Pods that Pod Security `restricted` refuses, and those that may write, hold a token or take all memory."""
    complaints = []
    for each in workloads(objects):
        spec = pod_of(each)["spec"]
        complaints += [f"{title(each)}: {line}" for line in _of_pod(spec)]
        for container in containers_of(each):
            lines = _of_container(container, spec.get("securityContext", {}))
            complaints += [f"{title(each)}, {container['name']}: {line}" for line in lines]
    return complaints


def _of_pod(spec: Object) -> list[str]:
    complaints = [f"has {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    if spec.get("automountServiceAccountToken") is not False:
        complaints.append("mounts the token of its service account")
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        complaints += [] if kinds <= VOLUMES else [f"volume {volume['name']} is a {kinds}"]
        if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
            complaints.append(f"volume {volume['name']} may fill the node's disk")
    return complaints


def _of_container(container: Object, of_pod: Object) -> list[str]:
    own = container.get("securityContext", {})
    context = of_pod | own
    complaints = []
    if (
        context.get("runAsNonRoot") is not True
        or not isinstance(context.get("runAsUser"), int)
        or not context["runAsUser"]
    ):
        complaints.append("may run as root")
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        complaints.append("has no seccomp profile")
    if own.get("readOnlyRootFilesystem") is not True:
        complaints.append("may write to its image")
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        complaints.append("may gain privileges")
    if own.get("capabilities") != {"drop": ["ALL"]}:
        complaints.append(f"has capabilities: {own.get('capabilities')}")
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
        complaints.append("says not what it needs")
    if any(port.get("hostPort") for port in container.get("ports", [])):
        complaints.append("has a port of the node")
    return complaints


def test_every_container_runs_with_the_least(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_security(objects)) == ""


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("runAsUser", 0),
        ("runAsNonRoot", False),
        ("readOnlyRootFilesystem", False),
        ("allowPrivilegeEscalation", True),
        ("privileged", True),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        ("capabilities", {}),
        ("seccompProfile", {"type": "Unconfined"}),
    ],
)
def test_a_planted_privilege_is_found(part: str, value: Any, gpu: list[Object]) -> None:
    main_container(named(gpu, "Deployment", "target-verifier"))["securityContext"][part] = value
    assert len(complaints_of_security(gpu)) == 1
