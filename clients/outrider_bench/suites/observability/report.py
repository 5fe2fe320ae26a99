"""The report of the observability suite: a table for each method, with quartiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.report import Report, environment_lines, notes_of, section_chapters, shown, summary_of_sections
from outrider_bench.suites.observability.claims import quartiles_of


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    config = results["config"]
    run = (
        f"{config['target']}, {config['concurrency']} generations at once of {config['max_tokens']} tokens at "
        f"temperature 0.7, {config['num_rounds']} rounds, seed {config['seed']}; the variants are turns of "
        "the same services"
    )
    return Report(
        "What metrics and traces cost",
        environment_lines(results, run),
        notes_of(results, interrupted="The run did not come to its end: rounds are missing."),
        section_chapters(results["sections"], "what", "quartiles", _quartiles_cell),
        summary_of_sections(results["sections"]),
    )


def _quartiles_cell(measurement: Mapping[str, Any]) -> str:
    low, high = quartiles_of(measurement)
    return f"{shown(low)} to {shown(high)}"
