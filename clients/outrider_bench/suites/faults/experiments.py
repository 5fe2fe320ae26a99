"""The faults of a run: which part, how, when and for how long. The seed decides, before anything starts."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from outrider_bench.config import FaultsConfig

KILL, STOP, RESTART, PARTITION, CUT, GARBAGE, SLOW = "kill", "stop", "restart", "partition", "cut", "garbage", "slow"
"""SIGKILL, and a start some time later; SIGSTOP for a while; an orderly restart; a wire that carries nothing for a
while; one that breaks every connection; one that changes bytes; one that takes long."""
PROCESS_KINDS = (KILL, STOP, RESTART)
WIRE_KINDS = (PARTITION, CUT, GARBAGE, SLOW)
SPECULATOR, DATASTORE, REDIS, VERIFIER = "speculator", "datastore", "redis", "verifier"
CHOICES = (
    *((SPECULATOR, kind) for kind in (*PROCESS_KINDS, *WIRE_KINDS)),
    *((part, kind) for part in (DATASTORE, REDIS) for kind in PROCESS_KINDS),
    *((VERIFIER, kind) for kind in PROCESS_KINDS),
)
"""Every kind of fault of every part. The wire is that between verifiers and speculator."""


@dataclass(frozen=True, slots=True)
class FaultsSizes:
    """Says how much is done beside the faults."""

    num_cases: int
    """Different prompts, parameters and seeds."""
    max_tokens: int
    calm_s: float
    """Before the faults and after them."""
    min_lasting_s: float = 0.3
    max_lasting_s: float = 4.0


SIZES = FaultsSizes(num_cases=24, max_tokens=192, calm_s=30.0)
QUICK_SIZES = FaultsSizes(num_cases=4, max_tokens=48, calm_s=2.0, max_lasting_s=0.6)
QUICK_NUM_FAULTS = 6
QUICK_MINUTES = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    due_s: float
    """Seconds from the end of the calm to its beginning."""
    part: str
    kind: str
    lasting_s: float
    """Seconds until it is healed; a process that is restarted takes longer to be back."""
    replica: int
    """Index of the verifier, if the part is one."""
    delay_ms: float
    """Each way, of a slow wire."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return asdict(self)


def sizes_of(config: FaultsConfig) -> FaultsSizes:
    """Choose the sizes of a run."""
    return QUICK_SIZES if config.is_quick else SIZES


def duration_s(config: FaultsConfig) -> float:
    """Return for how many seconds faults happen."""
    return 60 * (min(config.minutes, QUICK_MINUTES) if config.is_quick else config.minutes)


def faults_of(config: FaultsConfig) -> list[Fault]:
    """Draw the faults, in order: every choice about equally often, shuffled, at equal distances."""
    chosen, sizes = random.Random(config.seed), sizes_of(config)
    count = min(config.num_faults, QUICK_NUM_FAULTS) if config.is_quick else config.num_faults
    choices: list[tuple[str, str]] = []
    while len(choices) < count:
        choices += chosen.sample(CHOICES, len(CHOICES))  # every choice once, then all of them in another order
    distance_s = duration_s(config) / count
    return [
        Fault(
            number=number,
            due_s=number * distance_s,
            part=part,
            kind=kind,
            lasting_s=chosen.uniform(sizes.min_lasting_s, sizes.max_lasting_s),
            replica=chosen.randrange(2),
            delay_ms=chosen.uniform(20, 250),
        )
        for number, (part, kind) in enumerate(choices[:count])
    ]
