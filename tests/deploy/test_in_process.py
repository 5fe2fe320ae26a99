"""Both models in one process on one GPU: the verifier's pod has everything that both need, and nothing of a
speculator is left."""

from __future__ import annotations

import pytest

from outrider.verifier.settings import VerifierSettings
from tests.deploy.edges import edges, pods
from tests.deploy.environments import settings_of
from tests.support.manifests import (
    IN_PROCESS,
    Object,
    Variant,
    components_of,
    containers_of,
    main_container,
    mounts_of,
    named,
    of_kind,
    pod_of,
    rendered,
    title,
    variants,
    workloads,
)

pytestmark = pytest.mark.slow

BOTH = [each for each in variants() if IN_PROCESS in components_of(each.overlay) | {*each.components}]


@pytest.fixture(params=BOTH, ids=str)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(request.param)


def verifier_of(objects: list[Object]) -> Object:
    return named(objects, "Deployment", "target-verifier")


def claims_of(workload: Object) -> dict[str, str]:
    """Name of the claim that is mounted in the last container -> its folder there."""
    return {
        volume["persistentVolumeClaim"]["claimName"]: path
        for path, volume in mounts_of(workload, containers_of(workload)[-1])
        if "persistentVolumeClaim" in volume
    }


def test_nothing_of_a_speculator_is_left(objects: list[Object]) -> None:
    assert [title(each) for each in objects if "draft-speculator" in str(each["metadata"]["name"])] == []
    assert [title(each) for each in of_kind(objects, "PriorityClass")] == ["PriorityClass/outrider-target"]
    images = {container["image"].partition(":")[0] for each in workloads(objects) for container in containers_of(each)}
    assert "outrider/speculator" not in images
    assert "outrider/verifier" in images


def test_the_verifier_drafts_itself_on_the_gpu_of_its_target(objects: list[Object]) -> None:
    settings = settings_of(verifier_of(objects), objects)
    assert isinstance(settings, VerifierSettings)
    assert (settings.drafter, settings.speculator, settings.datastore) == (
        "in-process",
        "",
        "dns:///retrieval-datastore:50053",
    )
    assert (settings.draft.device, settings.draft.dtype) == (settings.device, "auto") == ("cuda:0", "auto")
    resources = main_container(verifier_of(objects))["resources"]
    assert resources["limits"].get("nvidia.com/gpu", 0) + len(resources.get("claims", [])) == 1


def test_each_model_is_read_from_the_volume_that_it_is_fetched_to_on_the_same_node(objects: list[Object]) -> None:
    verifier, fetch = verifier_of(objects), named(objects, "Job", "fetch-draft-model")
    settings, claims = settings_of(verifier, objects), claims_of(verifier)
    (revisions,) = (each["data"] for each in of_kind(objects, "ConfigMap") if "draft-revision" in each.get("data", {}))
    assert settings.model == f"{claims['target-model']}/{revisions['target-revision']}"
    assert settings.draft_model == f"{claims['draft-model']}/{revisions['draft-revision']}"
    assert claims_of(fetch).keys() == {"draft-model"}
    nodes = [pod_of(each)["spec"]["nodeSelector"] for each in (verifier, fetch)]
    assert nodes == [{"outrider/role": "target"}] * 2


def test_the_pod_waits_for_both_models_and_looks_for_no_other_pod(objects: list[Object]) -> None:
    spec = pod_of(verifier_of(objects))["spec"]
    names = [container["name"] for container in spec["initContainers"] if "restartPolicy" not in container]
    assert names == ["await-draft-model", "await-model"]
    assert "affinity" not in spec


def test_the_verifier_calls_nobody_but_the_datastore(objects: list[Object]) -> None:
    assert "draft-speculator" not in {each.name for each in pods(objects)}
    assert "draft-speculator" not in str(named(objects, "NetworkPolicy", "target-verifier"))
    called = {edge[1:] for edge in edges(objects) if edge[0] == "target-verifier"}
    assert called - {("dns", 53), ("otel-collector", 4317)} == {("retrieval-datastore", 50053)}


def test_only_verifiers_and_datastores_are_scaled() -> None:
    scaled = of_kind(rendered(Variant("gpu", ("keda", IN_PROCESS))), "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {"target-verifier", "retrieval-datastore"}
