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

from tests.support.manifests import Object, gpu_with, missing, named, rendered, title

pytestmark = pytest.mark.slow

OLDEST, NEWEST = "1.30", "1.37"
OLDEST_WITH_CLAIMS = "1.34"
"""The first version that has resource.k8s.io/v1, which objects with a claim need."""

VALIDATE_CUSTOM = Path(__file__).with_name("validate_custom.js")


def is_custom(found: Object) -> bool:
    """True if an object is none of Kubernetes' own, whose groups have no dot or end in k8s.io."""
    group, slash, _ = found["apiVersion"].partition("/")
    own = not slash or "." not in group or (group.endswith(".k8s.io") and group != "gateway.networking.k8s.io")
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
    custom = [each for each in objects if is_custom(each)]
    assert "\n".join(complaints_of_custom(custom)) == ""


def test_there_are_objects_and_custom_resources() -> None:
    objects = [each for name in ("monitoring", "keda", "tls") for each in rendered(gpu_with(name))]
    groups = {each["apiVersion"].partition("/")[0] for each in objects if is_custom(each)}
    assert {"monitoring.coreos.com", "keda.sh", "cert-manager.io"} <= groups


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        ({"replicsa": 2}, "replicsa"),
        ({"replicas": "two"}, "two"),
        ({"template": {"spec": {}}}, "containers"),
    ],
)
def test_a_planted_error_in_a_deployment_is_found(gpu: list[Object], planted: Object, word: str) -> None:
    deployment = named(gpu, "Deployment", "target-verifier")
    deployment["spec"] |= planted
    complaints = complaints_of_kubernetes([deployment])
    assert len(complaints) == 2
    assert all(word in line for line in complaints)


def test_a_field_newer_than_the_oldest_version_is_found(gpu: list[Object]) -> None:
    deployment = named(gpu, "Deployment", "target-verifier")
    deployment["spec"]["template"]["spec"]["hostnameOverride"] = "one"  # a field of 1.34
    (complaint,) = complaints_of_kubernetes([deployment])
    assert "hostnameOverride" in complaint
    assert OLDEST in complaint


def test_a_kind_that_is_not_there_is_found() -> None:
    beta = {"apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": {"name": "old"}, "spec": {}}
    assert len(complaints_of_kubernetes([beta])) == 2


@pytest.mark.parametrize(
    ("group_version", "kind", "spec", "word"),
    [
        (
            "cert-manager.io/v1",
            "Certificate",
            {"secretName": "s", "issuerRef": {"name": "i"}, "dnsName": ["a"]},
            "dnsName",
        ),
        (
            "cert-manager.io/v1",
            "Certificate",
            {"secretName": "s", "issuerRef": {"name": "i"}, "usages": ["all"]},
            "usages",
        ),
        ("cert-manager.io/v1", "Issuer", {"ca": {"secret": "s"}}, "secretName"),
        ("keda.sh/v1alpha1", "ScaledObject", {"scaleTargetRef": {"name": "a"}, "triggers": [{"type": 1}]}, "type"),
        (
            "keda.sh/v1alpha1",
            "ScaledObject",
            {"scaleTargetRef": {"name": "a"}, "triggers": [], "minReplicas": 1},
            "minR",
        ),
        ("monitoring.coreos.com/v1", "ServiceMonitor", {"selector": {}, "endpoints": [{"prot": "metrics"}]}, "prot"),
        ("monitoring.coreos.com/v1", "PrometheusRule", {"groups": [{"name": "g", "rules": [{"alert": "A"}]}]}, "expr"),
        (
            "gateway.networking.k8s.io/v1",
            "GRPCRoute",
            {"rules": [{"backendRefs": [{"name": "a", "port": "g"}]}]},
            "port",
        ),
        ("example.com/v1", "Widget", {}, "no types"),
        ("keda.sh/v1alpha1", "Scaler", {}, "no types"),
    ],
)
def test_a_planted_error_in_a_custom_resource_is_found(group_version: str, kind: str, spec: Object, word: str) -> None:
    wrong = {"apiVersion": group_version, "kind": kind, "metadata": {"name": "wrong"}, "spec": spec}
    complaints = complaints_of_custom([wrong])
    assert complaints
    assert all(word in line for line in complaints)
