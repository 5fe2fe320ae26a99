"""Objects that refer to pods find them: services, budgets, autoscalers, monitors, policies; and their ports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.manifests import (
    SERVICES,
    Object,
    environment_of,
    gpu_with,
    labels_of,
    main_container,
    named,
    of_kind,
    pod_of,
    port_number,
    ports_of,
    rendered,
    selects,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

GRPC_PORTS = {
    "target-verifier": 50051,
    "draft-speculator": 50052,
    "retrieval-datastore": 50053,
    "edge-speculator": 50061,
}
LISTENING = {"LISTEN": "grpc", "HEALTH_LISTEN": "health", "METRICS_LISTEN": "metrics"}
"""Setting of a gRPC service -> name of the port that it listens on."""
HTTP_PORTS = {"http": 8000, "metrics": 9464}
HTTP_LISTENING = {"LISTEN": "http", "METRICS_LISTEN": "metrics"}
GATEWAY = "gateway"
"""The only workload of ours that speaks HTTP."""


def selected(selector: Object, objects: list[Object]) -> list[Object]:
    """The workloads whose pods a selector matches."""
    return [each for each in workloads(objects) if selects(selector, labels_of(each))]


def spoken_by(workload: Object) -> str | None:
    """A Service's appProtocol for the port of a workload: HTTP/2 in plaintext, nothing for TLS; or HTTP."""
    variables = [variable["name"] for variable in main_container(workload).get("env", [])]
    has_tls = any(name.endswith("_TLS_CERT") for name in variables)
    if workload["metadata"]["name"] == GATEWAY:
        return "https" if has_tls else "http"
    return None if has_tls else "kubernetes.io/h2c"


def complaints_of_services(objects: list[Object]) -> list[str]:
    """Services without pods or with ports that their pods lack; services of gRPC that are not headless."""
    complaints = []
    for service in of_kind(objects, "Service"):
        name, spec = title(service), service["spec"]
        if "selector" not in spec:
            continue
        behind = selected({"matchLabels": spec["selector"]}, objects)
        complaints += [] if behind else [f"{name}: no pods have {spec['selector']}"]
        for each in behind:
            for port in spec["ports"]:
                number = port_number(each, port.get("targetPort", port["port"]))
                if number != port["port"]:
                    complaints.append(f"{name}: port {port['port']} leads to {number} of {title(each)}")
                elif ports_of(each).get(port["name"]) != number:
                    complaints.append(f"{name}: port {port['name']} is called otherwise in {title(each)}")
                if port["name"] in ("grpc", "http") and port.get("appProtocol") != spoken_by(each):
                    complaints.append(f"{name}: port {port['name']} is said to speak {port.get('appProtocol')}")
    for each in services_of_ours(objects):
        found = [s for s in of_kind(objects, "Service") if s["metadata"]["name"] == each["metadata"]["name"]]
        # gRPC clients spread their calls over the addresses of a name. HTTP clients use one, so it must be the
        # Service's.
        wanted = None if each["metadata"]["name"] == GATEWAY else "None"
        if len(found) != 1 or found[0]["spec"].get("clusterIP") != wanted:
            complaints.append(f"{title(each)} has no {'headless ' if wanted else ''}service of its name")
    return complaints


def complaints_of_ports(objects: list[Object]) -> list[str]:
    """Ports of ours with a wrong number or name, or that nothing listens on."""
    complaints = []
    for each in services_of_ours(objects):
        name, container = each["metadata"]["name"], main_container(each)
        is_http = name == GATEWAY
        expected = HTTP_PORTS if is_http else {"grpc": GRPC_PORTS[name], "health": 8080, "metrics": 9464}
        beside = {"http": 8000} if name == "target-verifier" and of_kind(objects, "InferencePool") else {}
        if ports_of(each) != expected | beside:
            complaints.append(f"{title(each)}: ports {ports_of(each)}, not {expected}")
        values = environment_of(container, objects)
        for setting, port in (HTTP_LISTENING if is_http else LISTENING).items():
            address = values.get(f"OUTRIDER_{SERVICES[name].upper()}_{setting}") or ""
            if not address.endswith(f":{expected[port]}"):
                complaints.append(f"{title(each)}: {setting} is {address!r}, port {port} is {expected[port]}")
    return complaints


def complaints_of_pools(objects: list[Object]) -> list[str]:
    """InferencePools without pods or with ports that their pods lack; routes to a pool that is not there."""
    complaints = []
    pools = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "InferencePool")}
    for name, spec in pools.items():
        chosen = selected(spec["selector"], objects)
        complaints += [] if chosen else [f"InferencePool/{name} selects nothing"]
        complaints += [
            f"InferencePool/{name}: {title(each)} has no port {port['number']}"
            for each in chosen
            for port in spec["targetPorts"]
            if port["number"] not in ports_of(each).values()
        ]
    for route in of_kind(objects, "HTTPRoute"):
        backends = [each for rule in route["spec"]["rules"] for each in rule["backendRefs"]]
        wanted = {each["name"] for each in backends if each.get("kind") == "InferencePool"}
        complaints += [f"{title(route)}: no InferencePool/{name}" for name in wanted - pools.keys()]
    return complaints


def complaints_of_selectors(objects: list[Object]) -> list[str]:
    """Workloads that select pods of others; budgets, monitors, policies and autoscalers of nothing."""
    complaints = []
    for each in workloads(objects):
        selector = each["spec"].get("selector")
        if selector is not None and selected(selector, objects) != [each]:
            complaints.append(f"{title(each)} selects {[title(other) for other in selected(selector, objects)]}")
    for each in of_kind(objects, "PodDisruptionBudget", "PodMonitor"):
        complaints += [] if selected(each["spec"]["selector"], objects) else [f"{title(each)} selects nothing"]
    for each in of_kind(objects, "NetworkPolicy"):
        complaints += (
            [] if selected(each["spec"].get("podSelector", {}), objects) else [f"{title(each)} selects nothing"]
        )
    for each in of_kind(objects, "ServiceMonitor"):
        complaints += _complaints_of_service_monitor(each, objects)
    for each in of_kind(objects, "PodMonitor"):
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            for pod in selected(each["spec"]["selector"], objects):
                known = endpoint["port"] in ports_of(pod)
                complaints += [] if known else [f"{title(each)}: {title(pod)} has no port {endpoint['port']}"]
    for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        if each["kind"] == "HorizontalPodAutoscaler":
            scaled = [w for w in workloads(objects) if w["metadata"]["name"] == target["name"]]
            complaints += [f"{title(w)} has replicas of its own" for w in scaled if "replicas" in w["spec"]]
        wanted = f"{target.get('kind', 'Deployment')}/{target['name']}"
        complaints += [] if wanted in map(title, workloads(objects)) else [f"{title(each)}: there is no {wanted}"]
    return complaints


def _complaints_of_service_monitor(monitor: Object, objects: list[Object]) -> list[str]:
    services = of_kind(objects, "Service")
    found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"].get("labels", {}))]
    complaints = [] if found else [f"{title(monitor)} selects no service"]
    for endpoint in monitor["spec"]["endpoints"]:
        for service in found:
            if endpoint["port"] not in [port["name"] for port in service["spec"]["ports"]]:
                complaints.append(f"{title(monitor)}: {title(service)} has no port {endpoint['port']}")
    return complaints


def complaints_of_references(objects: list[Object]) -> list[str]:
    """Named priority classes, accounts, claims and volumes that do not exist; volumes that nothing mounts."""
    complaints = []
    for each in workloads(objects):
        spec = pod_of(each)["spec"]
        names = [("PriorityClass", spec.get("priorityClassName")), ("ServiceAccount", spec.get("serviceAccountName"))]
        for kind, name in names:
            if name not in (None, "default") and f"{kind}/{name}" not in map(title, objects):
                complaints.append(f"{title(each)}: there is no {kind} {name}")
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        mounted = {mount["name"] for container in containers for mount in container.get("volumeMounts", [])}
        if volumes != mounted:
            complaints.append(f"{title(each)}: volumes {sorted(volumes)}, mounted {sorted(mounted)}")
        for volume in spec.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and f"PersistentVolumeClaim/{claim}" not in map(title, objects):
                complaints.append(f"{title(each)}: there is no PersistentVolumeClaim {claim}")
    return complaints


CHECKS: list[Callable[[list[Object]], list[str]]] = [
    complaints_of_services,
    complaints_of_ports,
    complaints_of_pools,
    complaints_of_selectors,
    complaints_of_references,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("complaints_of_"))
def test_what_is_referred_to_is_there(check: Callable[[list[Object]], list[str]], objects: list[Object]) -> None:
    assert "\n".join(check(objects)) == ""


def test_every_service_has_a_disruption_budget(objects: list[Object]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    for each in services_of_ours(objects):
        found = [budget for budget in budgets if selects(budget["spec"]["selector"], labels_of(each))]
        assert len(found) == 1, title(each)


def test_an_autoscaled_workload_says_no_number_of_replicas_of_its_own() -> None:
    objects = rendered(gpu_with("keda"))
    scaled = [each["spec"]["scaleTargetRef"]["name"] for each in of_kind(objects, "ScaledObject")]
    assert scaled
    for name in scaled:
        assert "replicas" not in named(objects, "Deployment", name)["spec"], name


def test_a_job_of_another_model_needs_no_step_by_hand(objects: list[Object]) -> None:
    for job in of_kind(objects, "Job"):
        assert job["spec"]["ttlSecondsAfterFinished"] == 600, title(job)
        told = job["metadata"]["annotations"]
        assert told["argocd.argoproj.io/hook-delete-policy"] == "BeforeHookCreation"
        assert told["kustomize.toolkit.fluxcd.io/force"] == "enabled"
