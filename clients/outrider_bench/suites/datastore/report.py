"""The report of the datastore suite: a table for each section, with the range of the repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.report import Report, environment_lines, notes_of, section_chapters, shown, summary_of_sections


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    config = results["config"]
    cores = config["cores"]
    run = f"repeats: {config['repeats']}, of which the median counts; seed: {config['seed']}"
    pinning = f"services on core {cores[0]}, clients on core {cores[-1]}" if cores else "not pinned"
    return Report(
        "The datastore, measured",
        environment_lines(results, run, pinning=pinning),
        notes_of(
            results,
            interrupted="The run did not come to its end: parts are missing.",
            failed="{what} could not be measured: {why}",
        ),
        section_chapters(results["sections"], "measured", "lowest–highest", _range_cell),
        summary_of_sections(results["sections"]),
    )


def _range_cell(measurement: Mapping[str, Any]) -> str:
    values = measurement["values"]
    return f"{shown(min(values))}–{shown(max(values))}" if len(values) > 1 else ""
