"""Measurements inside a worker process: local tiers, the ring, and how much of a text is retrieved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider_bench.datastore_streams import CONTINUATION_LEN
from outrider_bench.result import Runs, Section, Target, distribution_of, statistic_of
from outrider_bench.suites.datastore.data import DOCUMENT_LEN, made_up_tokens
from outrider_bench.suites.datastore.sizes import CONTEXT_LEN, DatastoreRun
from outrider_bench.workers.client import Worker

LOCAL_TARGET = Target("<=", 10)
BUILD_TARGET = Target("<=", 0.5)
REBUILD_TARGET = Target("<=", 2)
LARGE_TARGET = Target("<=", 60)
NUM_HELDOUT = 50_000
"""Made-up tokens behind those of a ring, for contexts."""
NAMES = {"ours": "tiers and ring", "arctic": "Arctic", "arctic_long": "Arctic, long"}


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Token streams in files of numpy: int32, one dimension."""

    learned: Path
    heldout: Path
    origin: str
    """Names their source in a few words."""

    @classmethod
    def write(cls, run: DatastoreRun, name: str, learned: Any, heldout: Any, origin: str) -> TokenFiles:
        """Writes both."""
        paths = [run.folder / f"{name}-{part}.npy" for part in ("learned", "heldout")]
        for path, tokens in zip(paths, (learned, heldout), strict=True):
            np.save(path, np.asarray(tokens, np.int32))
        return cls(paths[0], paths[1], origin)


def made_up_files(run: DatastoreRun) -> TokenFiles:
    """Make up as many tokens as a prior has, and some more."""
    sizes = run.sizes
    stream = made_up_tokens(sizes.prior_tokens + sizes.replay_tokens, run.config.seed)
    return TokenFiles.write(
        run, "made-up", stream[: sizes.prior_tokens], stream[sizes.prior_tokens :], "made-up tokens"
    )


async def measure_local_tiers(run: DatastoreRun, worker: Worker, files: TokenFiles) -> list[Section]:
    """Measure lookups in a session's tiers, beside a copy of the prior."""
    lookups, learning, others = Runs(), Runs(), Runs()
    hit_rate = 0.0
    for repeat in range(run.config.repeats):
        run.log(f"local tiers, repeat {repeat + 1}")
        answer = await worker.call(
            "local_tiers",
            prior=str(files.learned),
            heldout=str(files.heldout),
            document_len=DOCUMENT_LEN,
            num_lookups=run.sizes.num_local_lookups,
            max_continuation_len=CONTINUATION_LEN,
        )
        lookups.add_latencies("lookup", answer["lookup_us"], "p50", "p99")
        learning.add("learning a token", answer["learn_us_per_token"])
        others.add("building the prior's table", answer["build_s"])
        hit_rate = answer["hit_rate"]
    section = Section("Local tiers, in process")
    section.measurements = [*lookups.measurements("us", {"lookup: p50": LOCAL_TARGET}), *learning.measurements("us")]
    section.measurements += others.measurements("s")
    section.notes = [
        f"{files.origin}: a prior of {run.sizes.prior_tokens}, sessions of held-out text; {hit_rate:.0%} of the "
        f"contexts are found; {CONTINUATION_LEN} tokens a continuation."
    ]
    return [section]


async def measure_ring(run: DatastoreRun, worker: Worker) -> list[Section]:
    """Builds and lookups, by size; at the second size also lookups during a build."""
    small, middle, large = run.sizes.ring_sizes
    path = run.folder / "ring.npy"
    np.save(path, made_up_tokens(large + NUM_HELDOUT, run.config.seed))
    sorts: list[str] = worker.hello["sorts"]
    cores = sorted({*run.config.cores})
    runs = _RingRuns(run, worker, path)
    for repeat in range(run.config.repeats):
        for sort in sorts:
            run.log(f"ring of {middle} tokens, {sort}, repeat {repeat + 1}")
            await runs.measure(middle, sort, cores)
        # On one core lookups and a build take turns; with two, each can have its own.
        if len(cores) > 1:
            await runs.measure(middle, sorts[-1], cores[:1], ", one core")
    # With the last sort alone: pydivsufsort, the faster one, where it is installed.
    for size in (small, large):
        run.log(f"ring of {size} tokens, {sorts[-1]}")
        await runs.measure(size, sorts[-1], cores, rebuild=False)
    return [runs.section(sorts)]


class _RingRuns:
    """Measures rings of several sizes."""

    def __init__(self, run: DatastoreRun, worker: Worker, path: Path) -> None:
        self._run, self._worker, self._path = run, worker, path
        self._builds, self._lookups, self._ratios = Runs(), Runs(), Runs()
        self._by_size: dict[int, list[float]] = {}
        self._while_building: list[float] = []

    async def measure(self, size: int, sort: str, cores: list[int], where: str = "", *, rebuild: bool = True) -> None:
        """Measure one ring."""
        answer = await self._worker.call(
            "ring",
            tokens=str(self._path),
            document_len=DOCUMENT_LEN,
            num_tokens=size,
            num_lookups=self._run.sizes.num_ring_lookups,
            max_continuation_len=CONTINUATION_LEN,
            sort=sort,
            rebuild=rebuild,
            cores=cores,
        )
        idle, busy = answer["idle_us"], answer["busy_us"]
        name = f"{_shown(size)}, {sort}{where}"
        if not where:
            self._builds.add(f"{name}: build", answer["build_s"])
            self._by_size.setdefault(size, []).extend(idle)
            self._lookups.add_latencies(f"{name}: lookup, all indexed", answer["indexed_us"], "p50")
        self._lookups.add_latencies(f"{name}: lookup", idle, "p50", "p99")
        if busy:
            self._lookups.add_latencies(f"{name}: lookup during a build", busy, "p50", "p99")
            ratio = statistic_of(busy, "p99") / statistic_of(idle, "p99")
            self._ratios.add(f"{name}: p99 during a build, by idle", ratio)
            if not where:
                self._while_building += busy

    def section(self, sorts: list[str]) -> Section:
        """Return a section with everything measured."""
        sizes = self._run.sizes
        _, middle, large = sizes.ring_sizes
        builds = {f"{_shown(middle)}, {sort}: build": BUILD_TARGET for sort in sorts}
        ratios = {f"{_shown(middle)}, {sort}: p99 during a build, by idle": REBUILD_TARGET for sort in sorts}
        lookups = {f"{_shown(large)}, {sorts[-1]}: lookup: p50": LARGE_TARGET}
        section = Section("Ring, in process")
        section.measurements = self._builds.measurements("s", builds) + self._ratios.measurements("x", ratios)
        section.measurements += self._lookups.measurements("us", lookups)
        section.notes = [
            f"Made-up tokens in documents of {DOCUMENT_LEN}; if not said otherwise, one in 16 (at most 131 072) is "
            f"not indexed yet; contexts of {CONTEXT_LEN} held-out tokens, {CONTINUATION_LEN} tokens a continuation. "
            "Builds run in a background thread of lower priority, as in the datastore, on "
            + ("both cores if one is not named." if self._run.config.cores else "any core."),
        ]
        if "pydivsufsort" not in sorts:
            section.notes.append("pydivsufsort is not installed: numpy sorts.")
        ordered = sorted(self._by_size)
        section.distributions = {f"{_shown(size)} tokens": distribution_of(self._by_size[size]) for size in ordered}
        if self._while_building:
            during = f"{_shown(middle)} tokens, during a build"
            section.distributions[during] = distribution_of(self._while_building)
        section.curves = {
            statistic: [[size, statistic_of(self._by_size[size], statistic)] for size in ordered]
            for statistic in ("p50", "p99")
        }
        return section


async def measure_replay(run: DatastoreRun, worker: Worker, files: TokenFiles) -> list[Section]:
    """Held-out documents against the truth, ours beside Arctic Inference's suffix decoding if that is installed."""
    lookups, counts, shares, learning = Runs(), Runs(), Runs(), Runs()
    found: dict[str, Any] = {}
    for repeat in range(run.config.repeats):
        run.log(f"replaying held-out documents, repeat {repeat + 1}")
        found = await worker.call(
            "replay",
            documents=str(files.learned),
            heldout=str(files.heldout),
            document_len=DOCUMENT_LEN,
            max_continuation_len=CONTINUATION_LEN,
        )
        for key, tally in found.items():
            name = NAMES[key]
            lookups.add_latencies(f"{name}: proposal", tally["lookup_us"], "p50", "p99")
            counts.add(f"{name}: accepted a proposal", tally["accepted_per_proposal"])
            counts.add(f"{name}: proposed a proposal", tally["proposed_per_proposal"])
            shares.add(f"{name}: empty proposals", 100 * tally["empty_rate"])
            learning.add(f"{name}: learning a token", tally["learn_us_per_token"])
    section = Section("Replay of held-out documents")
    section.measurements = [*lookups.measurements("us"), *counts.measurements("tokens"), *shares.measurements("%")]
    section.measurements += learning.measurements("us")
    section.notes = [
        f"{files.origin}: {run.sizes.prior_tokens} learned as finished documents (shared tier and ring), "
        f"{run.sizes.replay_tokens} replayed in documents of {DOCUMENT_LEN}: at each position after a miss up to "
        f"{CONTINUATION_LEN} tokens are proposed, and those accepted that agree with the text.",
        "Learning: into an empty store, the ring's index included.",
    ]
    if "arctic" in found:
        section.notes.append(
            f"Arctic: SuffixDecodingCache of Arctic Inference, with max_spec_tokens = {CONTINUATION_LEN} and its own "
            "defaults; long: without its limits by match length and probability."
        )
    else:
        section.notes.append("Arctic Inference is not installed: ours alone.")
    return [section]


def _shown(size: int) -> str:
    """1 000 000 as 1 M."""
    for unit, factor in (("M", 1_000_000), ("k", 1000)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return str(size)
