"""Judges drafts by `outrider bench pair`: acceptance by position, predicted and measured gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console

from outrider_bench.config import PairConfig
from outrider_bench.pair.suite import PairSuite
from outrider_draft.card import Card, read_card


def judge(folder: Path, config: PairConfig, other: str | None, console: Console) -> tuple[int, str]:
    """Measures a draft, and another one in the same way; writes the result into the card of the first.

    Args:
        folder: The draft.
        config: What to measure; its draft is that folder.
        other: Name of another draft, see `load_model`; None means none.
        console: Takes the reports.

    Returns:
        The exit status, and a line that says which draft is better; no line if a measurement failed.

    Raises:
        NoDraft: The folder is no draft.
        OSError: The card cannot be written.
    """
    card = read_card(folder)
    status, found = _measured(config, console)
    if status:
        return status, ""
    judged: dict[str, Any] = {"target": config.target, "own": found}
    verdict = f"{folder}: {_gain(found):.2f}x the target alone"
    if other is not None:
        status, of_other = _measured(replace(config, draft=other), console)
        if status:
            return status, ""
        judged["other"] = {"draft": other, **of_other}
        better, worse = (str(folder), other) if _gain(found) >= _gain(of_other) else (other, str(folder))
        verdict += f", {other}: {_gain(of_other):.2f}x; {better} is better than {worse}"
    judged["verdict"] = verdict
    _keep(card, judged, folder)
    return 0, verdict


def _measured(config: PairConfig, console: Console) -> tuple[int, dict[str, Any]]:
    suite = PairSuite(config)
    status = suite.run(None, console)
    results = suite.results()
    pair = results["pairs"][0]
    names = ("acceptances", "best", "comparisons")
    found = {name: pair[name] for name in names}
    return status, {**found, "prompts": len(config.prompts), "max_tokens": config.max_tokens, "quick": config.is_quick}


def _gain(found: Mapping[str, Any]) -> float:
    """Returns the mean over temperatures of the best speed-up measured."""
    best: dict[float, float] = {}
    for one in found["comparisons"]:
        best[one["temperature"]] = max(one["measured"], best.get(one["temperature"], 0.0))
    return geometric_mean(best.values())


def _keep(card: Card, judged: dict[str, Any], folder: Path) -> None:
    card.judged = judged
    card.write(folder)
