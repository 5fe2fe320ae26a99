"""The report of the gateway suite: a table for each method, and one of its beginning and end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.report import Report, environment_lines, notes_of, section_chapters, summary_of_sections


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    config = results["config"]
    run = (
        f"{config['target']}, texts of {config['max_tokens']} tokens at temperature 0.7, {config['repeats']} repeats, "
        f"seed {config['seed']}; the doors are turns of the same services"
    )
    return Report(
        "What the gateway costs",
        environment_lines(results, run),
        notes_of(results, interrupted="The run did not come to its end: turns are missing."),
        section_chapters(results["sections"]),
        summary_of_sections(results["sections"]),
    )
