"""The report of the faults suite: what callers noticed, and the generations with something to tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from outrider_bench.report import (
    Chapter,
    Report,
    environment_lines,
    notes_of,
    section_chapters,
    summary_of_sections,
)

_MAX_STRANGE = 20


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    config = results["config"]
    kinds = Counter(f"{fault['kind']} of the {fault['part']}" for fault in results["faults"])
    lines = [
        f"{config['num_faults']} faults in {config['minutes']:g} minutes, {config['num_sessions']} sessions, seed "
        f"{config['seed']}; demo/target and demo/draft in float32, two verifiers",
        ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())),
    ]
    chapters = section_chapters(results["sections"], "seen")
    if strange := _strange_of(results):
        chapters.append(Chapter("Generations with something to tell", items=strange))
    return Report(
        "Faults, and what callers notice",
        environment_lines(results, *filter(None, lines)),
        notes_of(results, interrupted="The run did not come to its end: faults and numbers are missing."),
        chapters,
        summary_of_sections(results["sections"]),
    )


def _strange_of(results: Mapping[str, Any]) -> list[str]:
    """Describe generations that failed, or whose text is another one."""
    found = []
    for outcome in results["strange"][:_MAX_STRANGE]:
        place = outcome["first_difference"]
        what = outcome["error"] or (f"differs from token {place} on" if place is not None else "has another length")
        found.append(f"{outcome['method']}, {outcome['num_tokens']} tokens, {outcome['num_resumes']} resumed: {what}")
    left_out = len(results["strange"]) - len(found)
    return [*found, f"and {left_out} more"] if left_out else found
