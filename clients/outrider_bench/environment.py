"""The environment of a run: everything that a reader needs to compare results, and the cost of one forward there."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from outrider_bench.config import BenchConfig
from outrider_cli.prompts import Prompt, categories_of

_PACKAGES = ("outrider", "torch", "transformers", "scikit-learn", "grpcio", "protobuf", "redis", "numpy")


def describe_environment(models: Mapping[str, Mapping[str, Any]], cores: tuple[int, ...]) -> dict[str, Any]:
    """Describes the machine, the versions and the models."""
    return {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "pinning": {"target": cores[0], "everything_else": cores[1]} if cores else None,
        "threads_per_process": 1 if cores else None,
        "models": {role: describe_inflation(model) for role, model in models.items()},
    }


def describe_inflation(model: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a model; a model whose cost is inflated for the measurement gets a sentence that says so."""
    if not model.get("inflated"):
        return {"inflated": None, **model}
    note = (
        f"The cost of {model['model_id']} is inflated: it says what its {model['num_trained_parameters'] / 1e6:.1f} M "
        f"trained parameters say, at the price of {model['num_parameters'] / 1e6:.0f} M; the others change nothing."
    )
    return {**model, "note": note}


def describe_config(config: BenchConfig) -> dict[str, Any]:
    """Returns the configuration for results.json, with the number of prompts instead of the prompts."""
    values = asdict(config)
    values.pop("prompts")
    if config.address is not None:  # the flags do not describe a server that somebody else has started
        values |= {"target": None, "draft": None, "dtype": None, "draft_dtype": None, "cores": None}
    return values | describe_prompts(config.prompts, config.prompt_set)


def describe_prompts(prompts: Sequence[Prompt], prompt_set: str) -> dict[str, Any]:
    """Returns what results.json keeps of the prompts."""
    categories = [prompt.category for prompt in prompts]
    return {
        "prompt_set": prompt_set,
        "held_out": any(prompt.is_held_out for prompt in prompts),
        "num_prompts": len(categories),
        "categories": {name: categories.count(name) for name in categories_of(prompts)},
    }


def cpu_name() -> str:
    """Returns the processor's name, which Python does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


TARGET_ROWS = (1, 2, 4, 8, 16, 32)
DRAFT_ROWS = (1, 16)


@dataclass(frozen=True, slots=True)
class Machine:
    """Median times of forwards, in milliseconds, by number of rows."""

    target_forward_ms: Mapping[int, float] = field(default_factory=dict)
    draft_forward_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def speed_ratio(self) -> float | None:
        """C: forwards of the draft model, one row each, that fit into one of the target."""
        # DOUBLE, section 3.1: C = T_p / T_q, the times per token.
        target, draft = self.target_forward_ms.get(1), self.draft_forward_ms.get(1)
        return target / draft if target and draft else None

    @property
    def ceilings(self) -> dict[int, float]:
        """Speed-up with k perfect drafts a round, by k. Times between two measured numbers of rows are interpolated."""
        times = sorted(self.target_forward_ms.items())
        if len(times) < 2 or times[0][0] != 1:
            return {}
        rows, milliseconds = [row for row, _ in times], [time for _, time in times]
        base = milliseconds[0]
        # k drafts and the target's own token: k + 1 tokens from one forward of k + 1 rows. Waiting, rounds and the
        # network are free here.
        return {k: (k + 1) * base / float(np.interp(k + 1, rows, milliseconds)) for k in range(1, rows[-1])}

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "target_forward_ms": {str(rows): time for rows, time in sorted(self.target_forward_ms.items())},
            "draft_forward_ms": {str(rows): time for rows, time in sorted(self.draft_forward_ms.items())},
            "speed_ratio_C": self.speed_ratio,
            "perfect_draft_ceiling": {str(k): ceiling for k, ceiling in self.ceilings.items()},
        }
