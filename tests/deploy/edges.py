"""Which workload may call which: the connections that NetworkPolicies allow, computed as the API defines it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.support.manifests import Object, labels_of, of_kind, ports_of, selects, workloads

NAMESPACE = "outrider"


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or an address outside the cluster (`ip`)."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    namespace_labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    ip: str = ""


CLIENT = End("client", {"app": "chat"}, "apps", {"outrider/client": "true"})
PROMETHEUS = End("prometheus", {"app": "prometheus"}, "monitoring", {"outrider/monitoring": "true"})
DNS = End("dns", {"k8s-app": "kube-dns"}, "kube-system", {"kubernetes.io/metadata.name": "kube-system"})
STRANGER = End("stranger", {}, "elsewhere", {"kubernetes.io/metadata.name": "elsewhere"})
INTERNET = End("internet", ip="8.8.4.4")
PRIVATE = End("private", ip="10.1.2.3")
METADATA = End("metadata", ip="169.254.169.254")
ANYWHERE = [INTERNET, PRIVATE, METADATA]
OUTSIDE = [CLIENT, PROMETHEUS, DNS, STRANGER, *ANYWHERE]
PORTS = [22, 53, 80, 443, 2379, 4317, 4318, 6379, 6380, 6443, 8000, 8080, 9090, 9464, 10250, 50051, 50052, 50053, 50061]

Edge = tuple[str, str, int]
"""Names of both ends, and the port of the second."""


def pods(objects: list[Object]) -> list[End]:
    """One pod of every workload."""
    (namespace,) = of_kind(objects, "Namespace")
    labels = {"kubernetes.io/metadata.name": NAMESPACE, **namespace["metadata"].get("labels", {})}
    return [End(w["metadata"]["name"], labels_of(w), NAMESPACE, labels, ports_of(w)) for w in workloads(objects)]


def edges(objects: list[Object], protocol: str = "TCP") -> set[Edge]:
    """Every connection that the policies allow and that has at least one of our pods."""
    policies, ours = of_kind(objects, "NetworkPolicy"), pods(objects)
    pairs = [(source, target) for source in ours for target in [*ours, *OUTSIDE]]
    pairs += [(source, target) for source in OUTSIDE for target in ours]
    return {
        (source.name, target.name, port)
        for source, target in pairs
        for port in {*PORTS, *target.ports.values()}
        if allowed(policies, source, target, port, protocol)
    }


def allowed(policies: Iterable[Object], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """True if source may connect to a port of target: its egress and the target's ingress must both allow it."""
    policies = list(policies)
    return _passes(policies, "Egress", source, target, target, port, protocol) and _passes(
        policies, "Ingress", target, source, target, port, protocol
    )


def _passes(policies: list[Object], way: str, pod: End, peer: End, server: End, port: int, protocol: str) -> bool:
    """True if a pod's own policies let a connection pass; without a policy, everything passes."""
    own = [each for each in policies if _applies(each, way, pod)]
    rules, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
    return not own or any(
        _is_among(rule.get(peers), peer, policy) and _is_port(rule.get("ports"), server, port, protocol)
        for policy in own
        for rule in policy["spec"].get(rules) or []
    )


def _applies(policy: Object, way: str, pod: End) -> bool:
    spec = policy["spec"]
    default = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    return (
        not pod.ip
        and policy["metadata"]["namespace"] == pod.namespace
        and way in spec.get("policyTypes", default)
        and selects(spec.get("podSelector") or {}, pod.labels)
    )


def _is_among(peers: list[Object] | None, end: End, policy: Object) -> bool:
    """True if an end is among the peers of a rule; no list and an empty one mean everybody."""
    return not peers or any(_is_peer(peer, end, policy) for peer in peers)


def _is_peer(peer: Object, end: End, policy: Object) -> bool:
    if "ipBlock" in peer:
        if not end.ip:
            return False  # a block for others may contain no pod's address
        address = ipaddress.ip_address(end.ip)
        blocks = [ipaddress.ip_network(block) for block in peer["ipBlock"].get("except", [])]
        return address in ipaddress.ip_network(peer["ipBlock"]["cidr"]) and not any(
            address in block for block in blocks
        )
    if end.ip:
        return False
    if "namespaceSelector" in peer:
        of_namespace = selects(peer["namespaceSelector"] or {}, end.namespace_labels)
    else:
        of_namespace = end.namespace == policy["metadata"]["namespace"]
    return of_namespace and selects(peer.get("podSelector") or {}, end.labels)


def _is_port(ports: list[Object] | None, server: End, port: int, protocol: str) -> bool:
    """True if a port is among those of a rule; no list and an empty one mean all ports."""
    return not ports or any(each.get("protocol", "TCP") == protocol and _matches(each, server, port) for each in ports)


def _matches(rule: Object, server: End, port: int) -> bool:
    wanted = rule.get("port")
    if wanted is None:
        return True
    if isinstance(wanted, str):
        return server.ports.get(wanted) == port
    return bool(wanted <= port <= rule.get("endPort", wanted))
