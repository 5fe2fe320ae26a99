"""A pod that is deleted has time to drain: endpoints first, then the running calls."""

from __future__ import annotations

import pytest

from tests.deploy.environments import settings_of
from tests.support.manifests import Object, main_container, named, pod_of, services_of_ours, title

pytestmark = pytest.mark.slow

ENDING_S = 10.0
"""Time that a service has to end after its calls: threads, connections, the last spans."""


def complaints_of_drains(objects: list[Object]) -> list[str]:
    """Services that are not taken out of the endpoints first, or that are killed before they have drained."""
    complaints = []
    for each in services_of_ours(objects):
        sleep_s = main_container(each).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if sleep_s < 5:
            complaints.append(f"{title(each)}: sleeps {sleep_s} s before it ends, endpoints take longer to go")
        grace_s = pod_of(each)["spec"].get("terminationGracePeriodSeconds", 30)
        needed_s = sleep_s + settings_of(each, objects).drain_timeout_s + ENDING_S
        if grace_s < needed_s:
            complaints.append(f"{title(each)}: is killed after {grace_s} s and needs {needed_s}")
    return complaints


def test_every_service_has_the_time_to_drain(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_drains(objects)) == ""


@pytest.mark.parametrize("workload", ["target-verifier", "draft-speculator", "retrieval-datastore"])
def test_a_drain_that_is_longer_than_the_grace_period_is_found(workload: str, gpu: list[Object]) -> None:
    deployment = named(gpu, "Deployment", workload)
    drain_s = settings_of(deployment, gpu).drain_timeout_s
    # Both the sleep and the end count: exactly their sum is enough, one second less is not.
    pod_of(deployment)["spec"]["terminationGracePeriodSeconds"] = int(5 + drain_s + ENDING_S)
    assert "\n".join(complaints_of_drains(gpu)) == ""
    pod_of(deployment)["spec"]["terminationGracePeriodSeconds"] -= 1
    assert len(complaints_of_drains(gpu)) == 1


def test_a_longer_sleep_needs_a_longer_grace_period(gpu: list[Object]) -> None:
    deployment = named(gpu, "Deployment", "target-verifier")
    pod_of(deployment)["spec"]["terminationGracePeriodSeconds"] = int(
        5 + settings_of(deployment, gpu).drain_timeout_s + ENDING_S
    )
    main_container(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"] = 6
    assert len(complaints_of_drains(gpu)) == 1


def test_a_service_without_a_sleep_is_found(gpu: list[Object]) -> None:
    del main_container(named(gpu, "Deployment", "target-verifier"))["lifecycle"]
    assert len(complaints_of_drains(gpu)) == 1


def test_a_default_grace_period_is_thirty_seconds(gpu: list[Object]) -> None:
    deployment = named(gpu, "Deployment", "target-verifier")
    del pod_of(deployment)["spec"]["terminationGracePeriodSeconds"]
    env = [each for each in main_container(deployment)["env"] if not each["name"].endswith("DRAIN_TIMEOUT_S")]
    main_container(deployment)["env"] = env  # the setting's own default is 30 s
    (complaint,) = complaints_of_drains(gpu)
    assert "killed after 30 s and needs 45" in complaint
