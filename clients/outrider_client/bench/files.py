"""What a benchmark leaves behind: numbers, a report, and pictures if they can be drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def write_results(
    results: Mapping[str, Any],
    folder: Path,
    report_name: str,
    to_markdown: Callable[[Mapping[str, Any], Sequence[Path]], str],
    plots: str,
) -> list[Path]:
    """Writes results.json, the report and, if matplotlib is there, what `write_plots` of the module `plots` draws.

    Returns what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "results.json", folder / report_name
    # First of all the numbers: whatever goes wrong with the rest, they are kept.
    data.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    try:
        pictures: list[Path] = import_module(plots).write_plots(results, folder)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        pictures = []
    text.write_text(to_markdown(results, pictures), encoding="utf-8")
    return [data, text, *pictures]
