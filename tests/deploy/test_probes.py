"""Probes ask the health server, by names that the code has, and give a model time to load."""

from __future__ import annotations

import pytest

from outrider.server.health import LIVENESS
from outrider.v1 import datastore_pb2, speculator_pb2, verifier_pb2
from tests.deploy.environments import settings_of
from tests.support.manifests import Object, Variant, main_container, pod_of, ports_of, services_of_ours, title

pytestmark = pytest.mark.slow

HEALTH_NAMES = {
    "target-verifier": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
    "draft-speculator": speculator_pb2.DESCRIPTOR.services_by_name["SpeculatorService"].full_name,
    "retrieval-datastore": datastore_pb2.DESCRIPTOR.services_by_name["DatastoreService"].full_name,
    # It serves like the cloud's verifier.
    "edge-speculator": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
}
ALIVE = "/live"
"""A gateway's path that answers while it serves, with or without verifiers."""
LOADING_S = 600.0
"""Time that a GPU's model may take to load, from a shared disk."""


def complaints_of_probes(objects: list[Object], loading_s: float) -> list[str]:
    """Probes that are missing, of another type, of another port or service, or too impatient.

    The requested name is the pod's own service: readiness depends on no peer.
    """
    complaints = []
    for each in services_of_ours(objects):
        name, container = each["metadata"]["name"], main_container(each)
        if "readinessGates" in pod_of(each)["spec"]:
            complaints.append(f"{title(each)}: readiness depends on more than the pod")
        if name == "gateway":
            complaints += _complaints_of_http_probes(each, settings_of(each, objects).tls_cert != "")
            continue
        for kind, service in (
            ("startup", HEALTH_NAMES[name]),
            ("readiness", HEALTH_NAMES[name]),
            ("liveness", LIVENESS),
        ):
            probe = container.get(f"{kind}Probe", {})
            expected = {"port": ports_of(each)["health"], "service": service}
            if probe.get("grpc") != expected:
                complaints.append(f"{title(each)}: {kind} asks {probe}, not {expected}")
        startup = container.get("startupProbe", {})
        patience_s = startup.get("failureThreshold", 3) * startup.get("periodSeconds", 10)
        if name in ("target-verifier", "draft-speculator") and patience_s < loading_s:
            complaints.append(f"{title(each)}: may start for {patience_s} s, a model takes {loading_s}")
    return complaints


def _complaints_of_http_probes(workload: Object, has_tls: bool) -> list[str]:
    expected = {"path": ALIVE, "port": "http"} | ({"scheme": "HTTPS"} if has_tls else {})
    found = {kind: main_container(workload).get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")}
    return [
        f"{title(workload)}: {kind} asks {probe}, not {expected}"
        for kind, probe in found.items()
        if probe.get("httpGet") != expected
    ]


def test_probes_are_right(variant: Variant, objects: list[Object]) -> None:
    assert complaints_of_probes(objects, 60.0 if variant.overlay == "cpu" else LOADING_S) == []
