"""A pod that is deleted has time to drain: endpoints first, then the running calls."""

from __future__ import annotations

import pytest

from tests.deploy.environments import settings_of
from tests.support.manifests import Object, main_container, pod_of, services_of_ours, title

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
