"""The report of the papers: two counts, the claims of each paper, and every published method compared with ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.experiment import AS_PUBLISHED, OFF
from outrider_bench.papers.experiments import NOTE, PAIRS, TEMPERATURES
from outrider_bench.report import NONE, Chapter, Report, Table, environment_lines, notes_of, number_cell
from outrider_cli.prompts import ALL_CATEGORIES

CAPTION = (
    "value: of the named method by that of the other one, tokens/s where nothing else is said. 95 %: where it lies "
    "with other prompts of the same kind. sign: the effect that the paper claims. The papers' pairs, hardware and "
    "prompts are theirs."
)


def report_of(results: Mapping[str, Any]) -> Report:
    """Makes the report of what results.json keeps."""
    claims, config = results["claims"], results["config"]
    notes = notes_of(results, interrupted="The run did not come to its end: what is missing was not measured.")
    chapters = [
        Chapter(paper, [claims_table([one for one in claims if one["paper"] == paper])])
        for paper in dict.fromkeys(one["paper"] for one in claims)
    ]
    tables = [table for name in PAIRS if (table := pairs_table(name, results["experiments"].get(name, [])))]
    if tables:
        chapters.append(Chapter("As published beside ours, times off", tables))
    run = f"seed {config['seed']}; {results['duration_s'] / 60:.1f} minutes"
    return Report(
        "The papers' claims", environment_lines(results, run), [*notes, NOTE, CAPTION], chapters, counts(claims)
    )


def counts(claims: Sequence[Mapping[str, Any]]) -> str:
    """Returns the two counts in a sentence; claims that were not measured are in neither."""
    reached = [one["reaches_figure"] for one in claims if one["reaches_figure"] is not None]
    signs = [one for one in claims if one["has_right_sign"] is not None]
    certain = sum(one["has_right_sign"] and _is_certain(one) for one in signs)
    return (
        f"The paper's own figure reached: {sum(reached)} of {len(reached)}. Effect of the right sign: "
        f"{sum(one['has_right_sign'] for one in signs)} of {len(signs)}, {certain} of them with the whole interval."
    )


def _is_certain(claim: Mapping[str, Any]) -> bool:
    bound, interval = float(claim["sign"].split()[1]), claim["interval"]
    return interval is not None and not interval[0] <= bound <= interval[1]


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a row for each claim."""
    rows = [
        [
            one["what"] if one["metric"] in ("tokens/s", "tokens a round") else f"{one['what']} ({one['metric']})",
            f"{one['temperature']:g}",
            number_cell(one["value"], 2),
            NONE if one["interval"] is None else "–".join(f"{bound:.2f}" for bound in one["interval"]),
            number_cell(one["figure"], 2),
            _yes_or_no(one["reaches_figure"]),
            f"{one['sign']}: {_yes_or_no(one['has_right_sign'])}",
            one["source"],
        ]
        for one in claims
    ]
    columns = ("claim", "T", "value", "95 %", "paper", "reached", "sign", "place")
    return Table("", columns, rows, "", frozenset({"reached", "sign", "place"}), frozenset({"claim", "place"}))


def pairs_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Compares each method with its published form, at one ratio of speeds; None if nothing was measured."""
    found = {
        (row["method"], row["setting"], row["temperature"]): row["speedup_over_off"]
        for row in rows
        if row["category"] == ALL_CATEGORIES and row["method"] != OFF
    }
    labels = dict.fromkeys((method, setting) for method, setting, _ in found if setting != AS_PUBLISHED)
    cells = [
        [
            setting or method,
            *(
                number_cell(found.get((method, which, t)), 2)
                for t in TEMPERATURES
                for which in (setting, "" if setting else AS_PUBLISHED)
            ),
        ]
        for method, setting in labels
    ]
    columns = ["method", *(f"T = {t:g}{which}" for t in TEMPERATURES for which in ("", f", {AS_PUBLISHED}"))]
    return Table(f"C = {PAIRS[name]:g}", columns, cells) if cells else None


def _yes_or_no(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "no"
