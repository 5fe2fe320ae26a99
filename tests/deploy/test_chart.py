"""The Helm chart renders what kustomize renders, and each of its values has its effect."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.version import __version__
from tests.support.manifests import (
    DEPLOY,
    Object,
    Variant,
    containers_of,
    main_container,
    missing,
    named,
    of_kind,
    overlays,
    parsed,
    pod_of,
    rendered,
    rendered_text,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

CHART = DEPLOY / "chart"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@functools.cache
def _helm() -> str:
    helm = os.environ.get("OUTRIDER_HELM") or shutil.which("helm")
    if helm is None:
        missing("helm is not installed (.ci/install-kubectl)")
    return helm


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with the overlays in it, as `make chart` writes it."""
    folder = tmp_path_factory.mktemp("chart") / "outrider"
    shutil.copytree(CHART, folder, ignore=shutil.ignore_patterns("files"))
    (folder / "files").mkdir()
    for overlay in overlays():
        (folder / "files" / f"{overlay}.yaml").write_text(rendered_text(Variant(overlay)), encoding="utf-8")
    return folder


Template = Callable[..., list[Object]]


@pytest.fixture
def template(chart: Path, tmp_path: Path) -> Template:
    """What the chart renders to with these values."""

    def run(namespace: str = "outrider", **values: Any) -> list[Object]:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        command = [_helm(), "template", "release", str(chart), "--namespace", namespace, "--values", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return list(parsed(done.stdout))

    return run


def by_title(objects: list[Object]) -> dict[str, Object]:
    """The objects by kind and name; of a job, by the name that it has without its hash."""
    found = {}
    for each in objects:
        if each["kind"] == "Job":
            each["metadata"]["name"] = re.sub(r"-[0-9a-f]{8}$", "", each["metadata"]["name"])
        found[title(each)] = each
    assert len(found) == len(objects)
    return found


@pytest.mark.parametrize("overlay", overlays())
def test_the_chart_renders_what_kustomize_renders(overlay: str, template: Template) -> None:
    chart = by_title(template(overlay=overlay, redis={"createSecret": False}))
    kustomize = by_title([each for each in rendered(Variant(overlay)) if each["kind"] != "Namespace"])
    assert chart == kustomize


def test_one_command_is_enough_for_a_first_try(template: Template) -> None:
    objects = template()
    (secret,) = of_kind(objects, "Secret")
    assert secret["metadata"]["name"] == "redis"
    assert len(secret["data"]["password"]) > 80
    assert not of_kind(objects, "Certificate")
    assert {title(each) for each in services_of_ours(objects)} == {
        "Deployment/target-verifier",
        "Deployment/retrieval-datastore",
        "Deployment/gateway",
    }


def test_another_model_has_other_jobs_and_starts_pods_anew(template: Template) -> None:
    before = template(overlay="gpu")
    model = {"name": "meta-llama/Llama-3.1-8B-Instruct", "revision": REVISION}
    after = template(overlay="gpu", models={"target": model}, huggingface={"secret": "hub"})
    (config,) = (each for each in of_kind(after, "ConfigMap") if "target-model" in each["data"])
    assert (config["data"]["target-model"], config["data"]["target-revision"]) == (model["name"], REVISION)
    assert config["data"]["draft-model"] == "Qwen/Qwen3-0.6B"
    jobs = [{each["metadata"]["name"] for each in of_kind(objects, "Job")} for objects in (before, after)]
    assert jobs[0].isdisjoint(jobs[1])
    old, new = (named(objects, "Deployment", "target-verifier")["spec"]["template"] for objects in (before, after))
    assert old != new
    assert config["metadata"]["name"] in str(new)
    assert {each["metadata"]["name"] for each in of_kind(after, "ConfigMap")} >= set(
        re.findall(r"\bmodels-\w+", json.dumps(workloads(after)))
    )
    assert "'name': 'hub'" in str(of_kind(after, "Job"))


def test_values_reach_pods(template: Template) -> None:
    objects = template(
        overlay="gpu",
        image={"registry": "registry.example.com/me", "tag": "1.2.3", "pullSecrets": ["registry"]},
        gpu={"resource": "nvidia.com/mig-3g.71gb"},
        nodeLabels=False,
        priorityClasses=False,
        networkPolicies=False,
        replicas={"verifier": 3},
        resources={"verifier": {"limits": {"memory": "64Gi"}}},
        env={"verifier": {"OUTRIDER_VERIFIER_LOG_FORMAT": "text", "OUTRIDER_VERIFIER_KV_CACHE_TOKENS": "1000"}},
    )
    for each in services_of_ours(objects):
        images = [container["image"] for container in containers_of(each)]
        assert all(re.fullmatch(r"registry\.example\.com/me/\w+:1\.2\.3", image) for image in images)
        assert pod_of(each)["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    verifier = named(objects, "Deployment", "target-verifier")
    assert verifier["spec"]["replicas"] == 3
    assert main_container(verifier)["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/mig-3g.71gb": 1}
    assert main_container(verifier)["resources"]["requests"]["nvidia.com/mig-3g.71gb"] == 1
    variables = {each["name"]: each.get("value") for each in main_container(verifier)["env"]}
    assert len(variables) == len(main_container(verifier)["env"])
    assert variables["OUTRIDER_VERIFIER_LOG_FORMAT"] == "text"
    assert variables["OUTRIDER_VERIFIER_KV_CACHE_TOKENS"] == "1000"
    assert not pod_of(verifier)["spec"].keys() & {"nodeSelector", "priorityClassName"}
    assert not of_kind(objects, "PriorityClass", "NetworkPolicy")


def test_values_reach_volumes_gateways_and_callers(template: Template) -> None:
    caller = {"tenant": "acme", "sha256": "0" * 64, "roles": ["generate"]}
    objects = template(
        storage={"className": "fast", "accessModes": ["ReadWriteMany"], "target": "200Gi"},
        gateway={"minReplicas": 3, "maxReplicas": 30},
        tenants=[caller],
    )
    claims = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PersistentVolumeClaim")}
    assert {name: spec["resources"]["requests"]["storage"] for name, spec in claims.items()} == {
        "target-model": "200Gi",
        "draft-model": "5Gi",
    }
    assert {spec["storageClassName"] for spec in claims.values()} == {"fast"}
    assert all(spec["accessModes"] == ["ReadWriteMany"] for spec in claims.values())
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 30)
    assert json.loads(named(objects, "Secret", "callers")["stringData"]["callers.json"]) == [caller]


def test_a_release_is_in_its_own_namespace(template: Template) -> None:
    objects = template(namespace="llm", overlay="gpu")
    for each in objects:
        assert each["metadata"].get("namespace") in ({"llm"} if each["kind"] != "PriorityClass" else {None}), title(
            each
        )
    names = named(objects, "Certificate", "target-verifier")["spec"]["dnsNames"]
    assert {"target-verifier.llm", "target-verifier.llm.svc"} <= set(names)
    assert not [name for name in names if "outrider" in name]


@pytest.mark.parametrize(
    "values",
    [
        {"overlay": "none"},
        {"replica": {"verifier": 2}},
        {"replicas": {"target-verifier": 2}},
        {"models": {"target": {"revision": "main"}}},
        {"env": {"verifier": {"A": 1}}},
    ],
    ids=str,
)
def test_a_value_without_a_meaning_is_refused(values: dict[str, Any], template: Template) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        template(**values)


def test_the_chart_knows_every_overlay_and_has_the_version_of_the_package() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert sorted(schema["properties"]["overlay"]["enum"]) == overlays()
    (about,) = parsed((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert about["version"] == about["appVersion"] == __version__
