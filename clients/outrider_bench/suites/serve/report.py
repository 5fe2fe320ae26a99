"""The report of the load generator: the runs beside each other, then the latencies of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.report import NONE, Chapter, Report, Table, environment_lines, notes_of, number_cell, percent_cell

LATE_MS = 20.0
"""Lateness of the generator for one request in a hundred, in milliseconds, that is worth a note."""
BUSY_SHARE = 0.8
"""Share of a core beyond which the generator reads chunks late."""
LATENCY_CAPTION = (
    "TTFT: from sending a request to its first token. TPOT: from there to its end, by its tokens but one. ITL: between "
    "two chunks, each of which may bring several tokens. E2EL: from sending a request to its end. queue: the time it "
    "waited here before, under --max-concurrency; both: E2EL and queue. lateness: how long after it was due the "
    "generator came to it."
)
RUNS_CAPTION = (
    "done, failed: requests. req/s: completed ones by the duration of the run. good: completed within all limits of "
    "--goodput; the share is of all requests. tok/s: output tokens by the duration; peak: in the best second. at once: "
    "most requests that ran at the same moment. kept: accepted by drafted tokens. length: tokens of a round that had a "
    "draft, the target's own included. CPU: share of a core that this program took."
)
_ROWS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "client_queue_time": "queue",
    "e2el_including_client_queue": "both",
    "lateness": "lateness",
}


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    runs = results["runs"]
    chapters = [
        Chapter("Runs", [runs_table(runs, has_goodput=bool(results["config"]["goodput"]))], _sentences(results))
    ]
    for run in runs:
        # Below the last table only: once is enough.
        caption = LATENCY_CAPTION if run is runs[-1] else ""
        table = latency_table(run, results["config"]["percentiles"], caption)
        chapters.append(Chapter(f"{rate_of(run)}: latencies in ms", [table]))
    return Report("A server under load", _environment(results), _notes(results), chapters)


def runs_table(runs: Sequence[Mapping[str, Any]], *, has_goodput: bool) -> Table:
    """Make the table with a row for each run: throughput, goodput, acceptance, and the generator's own load."""
    columns = ["rate", "done", "failed", "req/s", *(["good/s", "good"] if has_goodput else [])]
    columns += ["tok/s", "peak", "at once", "kept", "length", "CPU"]
    cells = []
    for run in runs:
        good = [number_cell(run["request_goodput"], 2), percent_cell(run["goodput_share"])] if has_goodput else []
        rate = run.get("spec_decode_acceptance_rate")
        cells.append(
            [
                str(run["request_rate"]) if isinstance(run["request_rate"], str) else f"{run['request_rate']:g}",
                f"{run['completed']} of {run['num_prompts']}",
                str(run["failed"]),
                number_cell(run["request_throughput"], 2),
                *good,
                number_cell(run["output_throughput"], 1),
                number_cell(run["max_output_tokens_per_s"], 0),
                str(run["max_concurrent_requests"]),
                NONE if rate is None else percent_cell(rate / 100),
                number_cell(run.get("spec_decode_acceptance_length"), 2),
                percent_cell(run["client_cpu_share"]),
            ]
        )
    return Table("", columns, cells, RUNS_CAPTION)


def latency_table(run: Mapping[str, Any], percentiles: Sequence[float], caption: str = "") -> Table:
    """Make the table of a run's latencies, in milliseconds."""
    # The median is a percentile of its own name in the results; once is enough here.
    measures = ["mean", "std", *([] if 50.0 in percentiles else ["median"]), *(f"p{one:g}" for one in percentiles)]
    cells = [
        [label, *(number_cell(run[f"{measure}_{name}_ms"], 1) for measure in measures)]
        for name, label in _ROWS.items()
        if f"mean_{name}_ms" in run
    ]
    return Table("", ["", *(measure.replace("p", "P") for measure in measures)], cells, caption)


def rate_of(run: Mapping[str, Any]) -> str:
    """Name a run by its rate, in words."""
    return "all at once" if run["request_rate"] == "inf" else f"{run['request_rate']:g} req/s"


def _environment(results: Mapping[str, Any]) -> list[str]:
    config = results["config"]
    options = ", ".join(f"{name} {value}" for name, value in config["options"].items())
    where = config["address"] or f"a stack of our own, {config['target']} and {config['draft']}"
    model = results["environment"]["models"].get("target", {})
    return environment_lines(
        results,
        f"server: {where}; model {model.get('model_id', 'unknown')}, {model.get('dtype', 'dtype unknown')}",
        f"{config['arrival']} arrivals, burstiness {config['burstiness']}, seed {config['seed']}; {options}",
    )


def _sentences(results: Mapping[str, Any]) -> list[str]:
    """Say which requests come more than once: the second time a server may be faster."""
    num_texts, num_prompts = results["config"]["num_texts"], results["config"]["num_prompts"]
    found = []
    if num_texts < num_prompts:
        found.append(f"Each run has {num_prompts} requests of {num_texts} prompts.")
    if len(results["runs"]) > 1:
        found.append("Every run sends the same requests.")
    if found:
        found.append("A server that keeps prefixes, or learns from texts, is faster when they come again.")
    return found


def _notes(results: Mapping[str, Any]) -> list[str]:
    """Say what must be known before the numbers: an interruption, failures, and a generator that was the bottleneck."""
    found = notes_of(
        results, interrupted="The benchmark was interrupted: the last run lacks requests, and rates are missing."
    )
    for run in results["runs"]:
        if run["unfinished"]:
            found.append(f"{rate_of(run)}: {run['unfinished']} had not ended, or not begun.")
        for kind, failure in run["failures"].items():
            found.append(f"{rate_of(run)}: {failure['count']} failed with {kind}: {failure['message']}")
        late_ms, share = run["p99_lateness_ms"] or 0.0, run["client_cpu_share"] or 0.0
        if late_ms > LATE_MS or share > BUSY_SHARE:
            found.append(
                f"{rate_of(run)}: the generator took {percent_cell(share)} of a core and was late, by {late_ms:.0f} ms "
                "or more for one request in a hundred: it may be what was measured."
            )
    return found
