"""The cores that this machine gives us, and how the models on it share them.

No process is bound to a core: next to another program that has the same core, it would starve while others idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_GROUPS = Path("/sys/fs/cgroup")


class Threads(NamedTuple):
    """Threads of a forward of each model."""

    target: int
    draft: int


def usable_cores(groups: Path = _GROUPS, own_group: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the cores that this process may use: those that it is bound to, or fewer, where a control group gives it
    less time than these have."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *_limits(groups, own_group)]))


def _limits(groups: Path, own_group: Path) -> Iterator[int]:
    """Yields the whole cores that the control group, version 2, and each one around it have time for."""
    lines = own_group.read_text().splitlines() if own_group.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (groups / own, *(groups / own).parents):
        limit = group / "cpu.max"
        quota, *period = limit.read_text().split() if limit.exists() else ("max",)
        if quota != "max":
            yield int(quota) // int(period[0])
        if group == groups:
            return


def shared_out(num_cores: int, num_targets: int = 1, num_drafts: int = 1) -> Threads:
    """Returns the threads of each model, so that all of them together have a core each.

    Drafts are made while the target computes, and a thread that waits for a core holds up its whole forward. What a
    draft model reads of its weights for a few drafted tokens is some quarter of what its target reads for a round.

    Args:
        num_cores: Cores that there are, as `usable_cores` counts them.
        num_targets: Processes with the target.
        num_drafts: Processes with the draft model; 0 means that there is none.
    """
    for_drafts = max(num_drafts, num_cores // 4) if num_drafts else 0
    return Threads(
        target=max(1, (num_cores - for_drafts) // num_targets),
        draft=max(1, for_drafts // max(1, num_drafts)),
    )
