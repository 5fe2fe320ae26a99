"""Sizes of the datastore suite: once in full, and once in less than a minute, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider_bench.config import DatastoreConfig
from outrider_bench.suite import Log

CONTEXT_LEN = 16
"""Tokens of a context: more than any match needs."""
BATCH_LEN = 64
"""Contexts in a batch, and tokens in a record."""


@dataclass(frozen=True, slots=True)
class DatastoreSizes:
    """Says how much is measured. Times in seconds; what is repeated is so in each repeat."""

    prior_tokens: int = 200_000
    settle_s: float = 2.5
    """After a prior was loaded: replicas read it in the background, for themselves."""
    num_lookups: int = 1500
    num_paused_lookups: int = 150
    batch_s: float = 1.0
    num_local_lookups: int = 20_000
    ring_sizes: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    """The second one is built and searched in each repeat, the others once."""
    num_ring_lookups: int = 5000
    num_records: int = 50
    num_kills: int = 20
    append_s: float = 1.5
    """Seconds of recording before Redis is killed."""
    outage_s: float = 1.0
    num_sessions: int = 10_000
    num_warm_up_sessions: int = 5000
    """More than the bounded caches of a replica hold."""
    target: str = "demo/target-100m"
    num_prompts: int = 4
    max_tokens: int = 48
    replay_tokens: int = 40_000


QUICK = DatastoreSizes(
    prior_tokens=20_000,
    settle_s=1.5,
    num_lookups=200,
    num_paused_lookups=20,
    batch_s=0.2,
    num_local_lookups=1000,
    ring_sizes=(10_000, 50_000, 100_000),
    num_ring_lookups=500,
    num_records=5,
    num_kills=3,
    append_s=0.3,
    outage_s=0.2,
    num_sessions=1000,
    num_warm_up_sessions=100,
    target="demo/target",
    num_prompts=2,
    max_tokens=32,
    replay_tokens=2000,
)


@dataclass(frozen=True, slots=True)
class DatastoreRun:
    """One run of the suite."""

    config: DatastoreConfig
    sizes: DatastoreSizes
    folder: Path
    """For logs and data; deleted at the end."""
    log: Log
    """Takes a line about what is going on."""

    @property
    def server_cores(self) -> tuple[int, ...]:
        """Cores of Redis and the datastores; empty means any."""
        return self.config.cores[:1]

    @property
    def client_cores(self) -> tuple[int, ...]:
        """Cores of the clients; empty means any."""
        return self.config.cores[-1:]


def sizes_of(config: DatastoreConfig) -> DatastoreSizes:
    """Choose the sizes that the flags ask for."""
    return QUICK if config.is_quick else DatastoreSizes()
