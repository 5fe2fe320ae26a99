"""How a Deployment and a StatefulSet replace and count their pods: the rules alone, on what they see of the pods.

Each `*_steps` says what is to be done now; whoever calls does it, and asks again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = Mapping[str, Any]


class Seen(Protocol):
    """A pod, as a controller sees it."""

    revision: str
    is_terminating: bool
    created_at: float
    ordinal: int
    """Its number among those of a StatefulSet."""

    @property
    def is_ready(self) -> bool: ...

    def is_available(self, min_ready_s: float) -> bool: ...


@dataclass
class Steps:
    """What a controller wants done."""

    num_new: int = 0
    """Pods of the present template to make."""
    ordinals: list[int] = field(default_factory=list)
    """Of a StatefulSet's pods to make."""
    doomed: list[Any] = field(default_factory=list)
    """Pods to delete."""


def revision_of(workload: Json) -> str:
    """A name for the template as it is."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def deployment_steps(workload: Json, pods: Sequence[Seen]) -> Steps:
    """Of a Deployment with these pods. Pods that terminate are counted nowhere, as there."""
    spec = workload["spec"]
    num_wanted, min_ready_s = spec.get("replicas", 1), spec.get("minReadySeconds", 0)
    revision = revision_of(workload)
    living = [pod for pod in pods if not pod.is_terminating]
    new = [pod for pod in living if pod.revision == revision]
    old = [pod for pod in living if pod.revision != revision]
    strategy = spec.get("strategy", {})
    if strategy.get("type") == "Recreate":
        if old or (len(new) < num_wanted and any(pod.revision != revision for pod in pods)):
            return Steps(doomed=old)
        return _sized(num_wanted, new)
    if not old:
        return _sized(num_wanted, new)
    max_surge, max_unavailable = _limits(strategy.get("rollingUpdate", {}), num_wanted)
    steps = Steps(num_new=max(0, min(num_wanted - len(new), num_wanted + max_surge - len(living))))
    if len(new) > num_wanted:
        steps.doomed += _victims(new)[: len(new) - num_wanted]
    min_available = num_wanted - max_unavailable
    num_new_unavailable = sum(not pod.is_available(min_ready_s) for pod in new)
    max_cleaned = len(living) - min_available - num_new_unavailable
    unhealthy = [pod for pod in old if not pod.is_ready][: max(0, max_cleaned)]
    steps.doomed += unhealthy
    num_available = sum(pod.is_available(min_ready_s) for pod in living)
    healthy = [pod for pod in _victims(old) if pod not in unhealthy]
    steps.doomed += healthy[: max(0, min(num_available - min_available, max_cleaned - len(unhealthy)))]
    return steps


def is_rolled_out(workload: Json, pods: Sequence[Seen]) -> bool:
    """What `kubectl rollout status` waits for, and that what was replaced is gone."""
    spec = workload["spec"]
    new = [pod for pod in pods if pod.revision == revision_of(workload) and not pod.is_terminating]
    num_available = sum(pod.is_available(spec.get("minReadySeconds", 0)) for pod in new)
    return bool(len(pods) == len(new) == num_available == spec.get("replicas", 1))


def stateful_set_steps(workload: Json, pods: Sequence[Seen]) -> Steps:
    """Of a StatefulSet with these pods: one at a time, made from the first on, replaced from the last on."""
    spec = workload["spec"]
    num_wanted, min_ready_s = spec.get("replicas", 1), spec.get("minReadySeconds", 0)
    by_ordinal = {pod.ordinal: pod for pod in pods}
    surplus = sorted((pod for pod in pods if pod.ordinal >= num_wanted), key=lambda pod: -pod.ordinal)
    if surplus:
        return Steps(doomed=[] if surplus[0].is_terminating else surplus[:1])
    for ordinal in range(num_wanted):
        pod = by_ordinal.get(ordinal)
        if pod is None:
            return Steps(ordinals=[ordinal])
        if pod.is_terminating:
            return Steps()
        if not pod.is_available(min_ready_s) and pod.revision == revision_of(workload):
            return Steps()
    outdated = [pod for pod in pods if pod.revision != revision_of(workload)]
    return Steps(doomed=sorted(outdated, key=lambda pod: -pod.ordinal)[:1])


def _sized(num_wanted: int, pods: Sequence[Seen]) -> Steps:
    return Steps(num_new=max(0, num_wanted - len(pods)), doomed=_victims(pods)[: max(0, len(pods) - num_wanted)])


def _victims(pods: Sequence[Seen]) -> list[Seen]:
    """Who goes first: who is not ready, then who is younger."""
    return sorted(pods, key=lambda pod: (pod.is_ready, -pod.created_at))


def _limits(strategy: Json, num_wanted: int) -> tuple[int, int]:
    """maxSurge, rounded up, and maxUnavailable, rounded down; not both 0."""
    max_surge = _share(strategy.get("maxSurge", "25%"), num_wanted, math.ceil)
    max_unavailable = _share(strategy.get("maxUnavailable", "25%"), num_wanted, math.floor)
    return max_surge, max_unavailable if max_surge or max_unavailable else 1


def _share(value: int | str, num_wanted: int, rounded: Any) -> int:
    return value if isinstance(value, int) else int(rounded(int(value.removesuffix("%")) * num_wanted / 100))
