"""KEDA asks Prometheus for metrics that services export, about existing workloads."""

from __future__ import annotations

import pytest

from tests.deploy.exported import known
from tests.deploy.promql import labels_of
from tests.support.manifests import Object, gpu_with, of_kind, rendered

pytestmark = pytest.mark.slow


@pytest.fixture
def objects() -> list[Object]:
    return rendered(gpu_with("keda"))


def test_each_service_of_a_cluster_is_scaled_by_one_number(objects: list[Object]) -> None:
    scaled = of_kind(objects, "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == {
        "target-verifier",
        "draft-speculator",
        "retrieval-datastore",
    }
    for each in scaled:
        (trigger,) = each["spec"]["triggers"]
        assert labels_of(trigger["metadata"]["query"], known()) == frozenset()
        assert float(trigger["metadata"]["threshold"]) > 0
        assert each["spec"]["minReplicaCount"] >= 1
