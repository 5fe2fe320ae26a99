"""The report of the network suite: shares by round trip, bounds, bytes by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.experiment import OFF
from outrider_bench.report import (
    EXPERIMENT_CAPTION,
    NONE,
    Chapter,
    Report,
    Table,
    claims_tables,
    experiment_notes,
    experiment_table,
    experiments_environment,
    notes_of,
    of_part,
    summary_of_claims,
)
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

TITLES = {
    "rtt": "Round trips",
    "simulation": "What could be kept",
    "bytes": "Bytes",
    "wan": "A network that loses packets",
    "edge": "An application at the edge",
}
RTT_CAPTION = (
    "Each cell: output tokens a second, median of the repeats, prefill included; x: times off in the same repeats; in "
    "brackets: share of the same method's speed without a round trip, which off, the target alone, does not lose. "
    "Round trips take turns behind one proxy."
)
BOUND_CAPTION = (
    "What a best-first tree would bring whose probabilities are the true ones: simulated, with the times of forwards "
    "measured here and with how often the target's token is the draft model's first, second, ... choice. The best of "
    "several widths and of waiting or not counts. In brackets: the share of the speed without a round trip. No prefill."
)
TRAFFIC_CAPTION = (
    "TCP payload at a proxy between verifier and speculator, with all frames of HTTP/2 and gRPC and the opening of the "
    "stream. accepted: drafted tokens that were kept. Headers of TCP and IP, 40 bytes or more a packet, come on top."
)
_CAPTIONS = {
    "rtt": RTT_CAPTION,
    "simulation": BOUND_CAPTION,
    "bytes": TRAFFIC_CAPTION,
    "wan": EXPERIMENT_CAPTION,
    "edge": EXPERIMENT_CAPTION,
}


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    interrupted = "The run did not come to its end: parts are missing."
    notes = notes_of(results, interrupted=interrupted, failed="{what}: {why}")
    return Report(
        "Over a network, measured",
        experiments_environment(results),
        [*notes, *experiment_notes(results["experiments"])],
        [_chapter(results, part) for part in results["config"]["parts"]],
        summary_of_claims(results["claims"]),
    )


def _chapter(results: Mapping[str, Any], part: str) -> Chapter:
    tables = tables_of(results, part)
    sentences = [results["links"][part]] if part in results["links"] else []
    sentences += [one["note"] for one in of_part(results["experiments"], part) if one["note"]]
    sentences = list(dict.fromkeys([*sentences, _CAPTIONS[part]])) if tables else []
    return Chapter(TITLES[part], [*claims_tables(results, part), *tables], sentences, pictures=[part])


def tables_of(results: Mapping[str, Any], part: str) -> list[Table]:
    """Make all tables of a part."""
    if part == "rtt":
        return rtt_tables(of_part(results["experiments"], part))
    if part == "bytes":
        table = traffic_table(results["traffic"])
    elif part == "simulation":
        table = bound_table(results["bounds"])
    else:
        return [experiment_table(experiment) for experiment in of_part(results["experiments"], part)]
    return [table] if table is not None else []


def rtt_tables(experiments: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Make a table for each temperature: methods by round trips."""
    rows = [row for experiment in experiments for row in experiment["rows"] if row["category"] == ALL_CATEGORIES]
    return [
        _rtt_table(temperature, [row for row in rows if row["temperature"] == temperature])
        for temperature in sorted({row["temperature"] for row in rows})
    ]


def bound_table(bounds: Sequence[Mapping[str, Any]]) -> Table | None:
    """Make the table of simulated bounds; None means that nothing was simulated."""
    if not bounds:
        return None
    rtts_ms = sorted({point["rtt_ms"] for bound in bounds for point in bound["points"]})
    cells = []
    for bound in bounds:
        points = {point["rtt_ms"]: point for point in bound["points"]}
        shown = [_cell(points[rtt_ms], bound["off_tokens_per_s"]) if rtt_ms in points else NONE for rtt_ms in rtts_ms]
        cells.append([f"T = {bound['temperature']:g}", *shown])
    return Table("What could be kept, in simulated time", ("", *_headings(rtts_ms)), cells)


def traffic_table(traffic: Sequence[Mapping[str, Any]]) -> Table | None:
    """Make the table of bytes by contender; None means that nothing was counted."""
    if not traffic:
        return None
    columns = ("method", "T", "rounds", "accepted", "bytes up", "bytes down", "bytes/accepted", "bytes/round")
    cells = [
        [
            each["label"],
            f"{each['temperature']:g}",
            str(each["num_rounds"]),
            str(each["num_accepted"]),
            str(each["bytes_up"]),
            str(each["bytes_down"]),
            _whole(each["per_accepted"]),
            _whole(each["per_round"]),
        ]
        for each in traffic
    ]
    return Table("Bytes between verifier and speculator", columns, cells)


def _rtt_table(temperature: float, rows: Sequence[Row]) -> Table:
    rtts_ms = sorted({row["rtt_ms"] for row in rows})
    found = {(label_of(row), row["rtt_ms"]): row for row in rows if row["output_throughput"]}
    cells = []
    for label in dict.fromkeys(label_of(row) for row in rows):
        line = [label]
        for rtt_ms in rtts_ms:
            row, nearest = found.get((label, rtt_ms)), found.get((label, 0.0))
            if row is None:
                line.append(NONE)
                continue
            speedup = f", {row['speedup_over_off']:.2f}x" if label != OFF and row["speedup_over_off"] else ""
            share = f" ({row['output_throughput'] / nearest['output_throughput']:.2f})" if nearest else ""
            line.append(f"{row['output_throughput']:.1f}{speedup}{share}")
        cells.append(line)
    return Table(f"Tokens a second by round trip, T = {temperature:g}", ("method", *_headings(rtts_ms)), cells)


def _headings(rtts_ms: Sequence[float]) -> list[str]:
    return [f"{rtt_ms:g} ms" for rtt_ms in rtts_ms]


def _cell(point: Mapping[str, Any], off: float) -> str:
    share = f" ({point['kept']:.2f})" if point["kept"] is not None else ""
    return f"{point['tokens_per_s']:.1f}, {point['tokens_per_s'] / off:.2f}x{share}"


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"
