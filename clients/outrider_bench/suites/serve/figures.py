"""Pictures of the load generator: throughput and latency by the rate of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import BLUE, GREEN, ORANGE, draw_line, finish, new_figure


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw what changes with the rate; nothing where fewer than two runs have one that is finite."""
    # All at once has no place on an axis of rates.
    runs = sorted(
        (run for run in results["runs"] if run["median_ttft_ms"] and not isinstance(run["request_rate"], str)),
        key=lambda run: run["request_rate"],
    )
    return {"load": draw_load(runs) if len(runs) > 1 else None}


def draw_load(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw completed and good requests a second in one panel, and the medians of the latencies in another one."""
    rates = [run["request_rate"] for run in runs]
    figure, (throughput, latency) = new_figure(2)
    throughput.plot(rates, rates, color="black", linewidth=0.8, label="asked for")
    draw_line(throughput, [(run["request_rate"], run["request_throughput"]) for run in runs], "completed", BLUE)
    if runs[0]["request_goodput"] is not None:
        draw_line(
            throughput, [(run["request_rate"], run["request_goodput"]) for run in runs], "within all limits", GREEN
        )
    throughput.set_ylabel("requests a second")
    draw_line(latency, [(run["request_rate"], run["median_ttft_ms"]) for run in runs], "TTFT", ORANGE)
    draw_line(latency, [(run["request_rate"], run["median_e2el_ms"]) for run in runs], "E2EL", BLUE)
    latency.set_ylabel("ms (median)")
    for axes in (throughput, latency):
        axes.set_xlabel("requests a second that arrive")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        finish(axes)
    return figure
