"""Network policies allow exactly the edges of the design, at both of their ends."""

from __future__ import annotations

import pytest

from tests.deploy.edges import ANYWHERE, OUTSIDE, Edge, edges, pods
from tests.support.manifests import (
    POOLED,
    SERVICES,
    Object,
    Variant,
    components_of,
    gpu_with,
    named,
    of_kind,
    rendered,
    variants,
)

pytestmark = pytest.mark.slow

WITH_POLICIES = [each for each in variants() if "network-policies" in components_of(each.overlay) | {*each.components}]


def expected_edges(names: set[str], overlay: str) -> set[Edge]:
    """The edges of the design among the existing workloads."""
    found: set[Edge] = {
        ("client", "target-verifier", 50051),
        ("client", "edge-speculator", 50061),
        ("client", "gateway", 8000),
        ("gateway", "target-verifier", 50051),
        ("target-verifier", "draft-speculator", 50052),
        ("target-verifier", "retrieval-datastore", 50053),
        ("draft-speculator", "retrieval-datastore", 50053),
        ("retrieval-datastore", "redis", 6379),
    }
    found |= {("prometheus", name, 9464) for name in SERVICES}
    found |= {(name, "otel-collector", 4317) for name in SERVICES}
    inside = {edge for edge in found if {edge[0], edge[1]} <= names | {"client", "prometheus"}}
    return inside | {(name, "dns", 53) for name in names} | _edges_to_outside(names, overlay)


def _edges_to_outside(names: set[str], overlay: str) -> set[Edge]:
    """The edges to and from addresses that only the deployer knows."""
    found: set[Edge] = set()
    if "otel-collector" in names:  # its backend may be a pod, too
        found |= {("otel-collector", end.name, port) for end in OUTSIDE for port in (443, 4317)}
    for end in (each.name for each in ANYWHERE):
        found |= {(name, end, 443) for name in names if name.startswith("fetch-")}  # from Hugging Face
        if overlay == "external-redis":
            found.add(("retrieval-datastore", end, 6379))
        if overlay == "edge":
            found.add(("edge-speculator", end, 50051))
        if overlay == "cloud":
            found.add((end, "target-verifier", 50051))
    return found


@pytest.mark.parametrize("variant", WITH_POLICIES, ids=str)
def test_the_edges_are_those_of_the_design(variant: Variant) -> None:
    objects = rendered(variant)
    expected = expected_edges({each.name for each in pods(objects)}, variant.overlay)
    if POOLED in variant.components:
        expected.add(("client", "target-verifier", 8000))
    found = edges(objects)
    assert (found - expected, expected - found) == (set(), set())


@pytest.mark.parametrize("variant", WITH_POLICIES, ids=str)
def test_names_are_looked_up_by_udp_too_and_nothing_else_is(variant: Variant) -> None:
    objects = rendered(variant)
    assert edges(objects, "UDP") == {(each.name, "dns", 53) for each in pods(objects)}


@pytest.mark.parametrize("variant", WITH_POLICIES, ids=str)
def test_nothing_is_allowed_by_default_to_any_pod(variant: Variant) -> None:
    found = of_kind(rendered(variant), "NetworkPolicy")
    denying = [each["spec"] for each in found if not each["spec"].get("podSelector") and "egress" not in each["spec"]]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in denying


@pytest.mark.parametrize("overlay", ["gpu", "cloud", "edge", "external-redis"])
def test_what_is_for_production_has_policies(overlay: str) -> None:
    assert "network-policies" in components_of(overlay)


def test_without_policies_everything_is_allowed(gpu: list[Object]) -> None:
    bare = [each for each in gpu if each["kind"] != "NetworkPolicy"]
    assert ("stranger", "redis", 22) in edges(bare)


def policies() -> list[Object]:
    """The objects of `gpu` with policies, to plant an error in."""
    return rendered(gpu_with("network-policies"))


@pytest.mark.parametrize(
    ("policy", "rules", "added"),
    [
        ("redis", {"ingress": [{"from": [{"podSelector": {}}]}]}, set()),  # the others' egress still holds
        ("redis", {"ingress": [{}]}, {("client", "redis", 6379), ("stranger", "redis", 22)}),
        ("redis", {"ingress": [{"from": [{"namespaceSelector": {}}]}]}, {("stranger", "redis", 6379)}),
        (
            "redis",
            {"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "chat"}}}]}]},
            {("client", "redis", 6379)},
        ),
        ("target-verifier", {"egress": [{}]}, {("target-verifier", "internet", 443)}),
        (
            "target-verifier",
            {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]}]},
            {("target-verifier", "internet", 443), ("target-verifier", "metadata", 80)},
        ),
        (
            "target-verifier",
            {"egress": [{"ports": [{"port": 9000, "endPort": 9100}]}]},
            {("target-verifier", "client", 9090)},
        ),
    ],
)
def test_a_planted_rule_is_found(policy: str, rules: Object, added: set[Edge]) -> None:
    objects = policies()
    before = edges(objects)
    named(objects, "NetworkPolicy", policy)["spec"].update(rules)
    after = edges(objects)
    assert added <= after - before
    if not added:
        assert after == before
    if policy == "target-verifier" and "except" in str(rules):
        assert ("target-verifier", "private", 443) not in after
