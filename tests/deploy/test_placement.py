"""Where the models run: each on its own node with its own GPU, close together, replaced one at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from tests.support.manifests import (
    HOSTNAME,
    IN_PROCESS,
    ZONE,
    Object,
    Variant,
    labels_of,
    main_container,
    named,
    num_gpus,
    of_kind,
    pod_of,
    rendered,
    selects,
    variants,
)

pytestmark = pytest.mark.slow

MODELS = ("target-verifier", "draft-speculator")
ON_GPUS = [each for each in variants() if each.overlay in ("gpu", "external-redis")]
WITH_BOTH = [each for each in ON_GPUS if IN_PROCESS not in each.components]
WITH_GPU = [*ON_GPUS, Variant("one-gpu"), Variant("cloud")]


def required_terms(pod: Object) -> list[Object]:
    """The terms of a pod's required anti-affinity."""
    affinity = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
    return list(affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []))


def shun(one: Object, other: Object) -> bool:
    """True if, by its own terms, one pod avoids the node (host name) of the other."""
    labels = other["metadata"]["labels"]
    return any(
        term["topologyKey"] == HOSTNAME and selects(term["labelSelector"], labels) and not term.get("namespaceSelector")
        for term in required_terms(one)
    )


def scheduled(pods: list[Object], num_nodes: int) -> list[int | None]:
    """Node of each pod, in their order; None if a pod finds none.

    Packs: a pod goes to the fullest node that takes it, as with an autoscaler that saves nodes. All nodes have room for
    all. As in Kubernetes, a pod's own terms count, and those of the pods that are already there.
    """
    nodes: dict[int, list[Object]] = defaultdict(list)
    placed: list[int | None] = []
    for pod in pods:
        fullest = sorted(range(num_nodes), key=lambda node: -len(nodes[node]))
        free = (n for n in fullest if not any(shun(pod, other) or shun(other, pod) for other in nodes[n]))
        node = next(free, None)
        placed.append(node)
        if node is not None:
            nodes[node].append(pod)
    return placed


def shared_nodes(objects: list[Object], num_nodes: int) -> set[str]:
    """Nodes with both models, and pods without a node, over all orders in which two pods of each may come."""
    pods = [pod_of(named(objects, "Deployment", name)) for name in MODELS for _ in range(2)]
    found = set()
    for order in itertools.permutations(range(4)):
        nodes = scheduled([pods[index] for index in order], num_nodes)
        models: dict[int | None, set[int]] = defaultdict(set)
        for index, node in zip(order, nodes, strict=True):
            models[node].add(index // 2)
        found |= {"pending"} if None in models else set()
        found |= {"shared" for node, both in models.items() if node is not None and len(both) > 1}
    return found


def complaints_of_affinity(objects: list[Object]) -> list[str]:
    """Models that may share a node by their own terms, or that are not attracted to each other's zone."""
    complaints = []
    for one, other in (MODELS, MODELS[::-1]):
        pod, peer = (pod_of(named(objects, "Deployment", name)) for name in (one, other))
        complaints += [] if shun(pod, peer) else [f"{one} does not shun the node of {other}"]
        complaints += [f"{one} shuns its own kind"] if shun(pod, pod) else []
        affinity = pod["spec"].get("affinity", {}).get("podAffinity", {})
        terms = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
        near = [each["podAffinityTerm"] for each in terms if each["podAffinityTerm"]["topologyKey"] == ZONE]
        if not any(selects(term["labelSelector"], peer["metadata"]["labels"]) for term in near):
            complaints.append(f"{one} is not drawn to the zone of {other}")
    return complaints


def complaints_of_gpus(objects: list[Object], name: str) -> list[str]:
    """A model without a GPU, or one that may land on any node, or takes two GPUs while it is replaced."""
    complaints = []
    deployment = named(objects, "Deployment", name)
    pod, resources = pod_of(deployment)["spec"], main_container(deployment)["resources"]
    claims = resources.get("claims", [])
    if num_gpus(resources) + len(claims) != 1:
        complaints.append(f"{name}: GPUs by limit {num_gpus(resources)}, by claim {claims}")
    if {each["name"] for each in claims} != {each["name"] for each in pod.get("resourceClaims", [])}:
        complaints.append(f"{name}: the container's claims are not the pod's")
    templates = {each["metadata"]["name"] for each in of_kind(objects, "ResourceClaimTemplate")}
    wanted = {each.get("resourceClaimTemplateName") for each in pod.get("resourceClaims", [])}
    complaints += [] if wanted <= templates else [f"{name}: no ResourceClaimTemplate among {wanted}"]
    if not pod.get("nodeSelector"):
        complaints.append(f"{name}: has no nodeSelector")
    if not any(each.get("key") == "nvidia.com/gpu" for each in pod.get("tolerations", [])):
        complaints.append(f"{name}: does not tolerate nodes for GPUs")
    update = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
    if (update.get("maxSurge"), update.get("maxUnavailable")) != (0, 1):
        complaints.append(f"{name}: is replaced by {update}, which needs a GPU more")
    spread = {each["topologyKey"] for each in pod.get("topologySpreadConstraints", [])}
    complaints += [] if {HOSTNAME, ZONE} <= spread else [f"{name}: is spread over {spread}"]
    for each in pod.get("topologySpreadConstraints", []):
        if not selects(each["labelSelector"], labels_of(deployment)):
            complaints.append(f"{name}: is spread among others than itself")
    return complaints


def complaints_of_priorities(objects: list[Object]) -> list[str]:
    """Drafts with the target's priority: they must be evicted first, because texts do not need them."""
    values = {}
    for name in MODELS:
        class_name = pod_of(named(objects, "Deployment", name))["spec"].get("priorityClassName")
        found = [each for each in of_kind(objects, "PriorityClass") if each["metadata"]["name"] == class_name]
        values[name] = found[0]["value"] if found else 0
    return [] if values[MODELS[0]] > values[MODELS[1]] > 0 else [f"priorities are {values}"]


@pytest.mark.parametrize("variant", WITH_BOTH, ids=str)
def test_the_models_never_share_a_node(variant: Variant) -> None:
    objects = rendered(variant)
    assert "\n".join(complaints_of_affinity(objects)) == ""
    assert shared_nodes(objects, num_nodes=2) == set()
    assert shared_nodes(objects, num_nodes=1) == {"pending"}


@pytest.mark.parametrize("variant", WITH_GPU, ids=str)
def test_each_model_has_gpus_that_are_its_own(variant: Variant) -> None:
    objects = rendered(variant)
    names = MODELS if variant in WITH_BOTH else MODELS[:1]
    assert "\n".join(line for name in names for line in complaints_of_gpus(objects, name)) == ""


@pytest.mark.parametrize("variant", WITH_BOTH, ids=str)
def test_the_draft_goes_before_the_target(variant: Variant) -> None:
    assert "\n".join(complaints_of_priorities(rendered(variant))) == ""
