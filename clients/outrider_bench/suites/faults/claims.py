"""Claims about faults: what callers saw, beside what they should."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider_bench.result import Measurement, Section, Target
from outrider_bench.suites.faults.experiments import CHOICES, SLOW, SPECULATOR
from outrider_bench.suites.faults.observed import Holdings, Observed

NONE = Target("<=", 0)
RECOVERY = Target("<=", 2)
MORE_FILES, MORE_THREADS = Target("<=", 4), Target("<=", 4)
MORE_MEMORY = Target("<=", 10)
GREW = "grew in the calm after the faults"


def sections_of(observed: Observed, snapshots: Sequence[Holdings]) -> list[Section]:
    """Return the numbers that are known. `snapshots`: before the faults, after them, and after another calm."""
    sections = [_texts(observed), _recovery(observed)]
    return [*sections, _leaks(snapshots)] if len(snapshots) == 3 else sections


def _texts(observed: Observed) -> Section:
    outcomes = observed.outcomes
    resumed = [outcome for outcome in outcomes if outcome.num_resumes]
    differing = [outcome for outcome in outcomes if not outcome.error and not outcome.is_equal]
    section = Section("What callers notice")
    section.measurements = [
        Measurement("texts that differ from those without faults", "texts", (len(differing),), NONE),
        Measurement(
            "errors that reached a caller", "errors", (sum(bool(outcome.error) for outcome in outcomes),), NONE
        ),
        Measurement("generations", "", (len(outcomes),)),
        Measurement("generations that went on in another call", "", (len(resumed),)),
        Measurement("calls that they went on in", "", (sum(outcome.num_resumes for outcome in resumed),)),
        Measurement("faults", "", (len(observed.suffered),)),
    ]
    if outcomes:
        pauses = [outcome.longest_pause_s for outcome in outcomes]
        section.measurements.append(Measurement("longest pause in a generation: median", "s", (median(pauses),)))
        section.measurements.append(Measurement("longest pause in a generation: longest", "s", (max(pauses),)))
    section.notes = [
        "Every text is compared, token by token, with that of the same prompt, parameters and seed by plain decoding "
        "before the faults. A pause is the time between two chunks, or before the first."
    ]
    return section


def _recovery(observed: Observed) -> Section:
    section = Section("From the speculator's return to its first accepted token")
    for part, kind in CHOICES:
        suffered = [one for one in observed.suffered if (one.fault.part, one.fault.kind) == (part, kind)]
        known = [seconds for one in suffered if (seconds := observed.recovery_s(one)) is not None]
        if part != SPECULATOR or kind == SLOW or not known:
            continue
        section.measurements.append(Measurement(f"{kind}: median of {len(known)}", "s", (median(known),)))
        section.measurements.append(Measurement(f"{kind}: longest", "s", (max(known),), RECOVERY))
    section.notes = [
        "It is back when its process serves again, goes on, or its wire is whole. Faults that the next one of the "
        "same part followed before that are left out."
    ]
    return section


def _leaks(snapshots: Sequence[Holdings]) -> Section:
    before, between, after = snapshots
    section = Section("What is left when nobody generates")
    num_sessions = sum(after.num_sessions.values()) + sum(between.num_sessions.values())
    section.measurements.append(Measurement("sessions on all services", "", (num_sessions,), NONE))
    num_tasks = after.num_client_tasks - before.num_client_tasks
    section.measurements.append(Measurement("more asyncio tasks in the clients than before", "", (num_tasks,), NONE))
    # Growth is counted from the snapshot after the faults: those before may be of processes that were killed since.
    for name, process in after.processes.items():
        former = between.processes[name]
        grown = 100 * (process.memory_bytes / former.memory_bytes - 1)
        section.measurements += [
            Measurement(f"{name}: open files that {GREW}", "", (process.num_files - former.num_files,), MORE_FILES),
            Measurement(f"{name}: threads that {GREW}", "", (process.num_threads - former.num_threads,), MORE_THREADS),
            Measurement(f"{name}: memory that {GREW}", "%", (grown,), MORE_MEMORY),
        ]
    section.notes = [
        f"{name}: {process.num_files} open files before the faults, {between.processes[name].num_files} after them, "
        f"{after.processes[name].num_files} at the end."
        for name, process in before.processes.items()
    ]
    return section
