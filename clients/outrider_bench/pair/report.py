"""The report of the pair suite: is speculation worth it, with which setting, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.pair.comparison import INCONCLUSIVE, MET, MISSED, TOLERANCE
from outrider_bench.report import (
    EXPERIMENT_CAPTION,
    NONE,
    Chapter,
    Report,
    Table,
    environment_lines,
    experiment_table,
    notes_of,
    number_cell,
    percent_cell,
    run_line,
)
from outrider_cli.prompts import ALL_CATEGORIES

SHOWN_POSITIONS = 8
"""Positions of a chain that fit into a table; results.json has all."""
ACCEPTANCE_CAPTION = (
    "Share of the drafted tokens kept at each position of a chain, of the chains that were kept up to there. match: a "
    "drafted token is kept if it equals the target's draw; with shared noise the draft model chooses with the target's "
    "noise, else by its own probabilities alone. 1 - TV: what the ratio rule keeps. alpha: of all tokens. tokens: of a "
    "round with the longest chain."
)
PREDICTION_CAPTION = (
    "Predicted: the pair's texts replayed by the services' own sessions under a simulated clock, at measured costs. "
    "Decoding alone, without prefill; γ: most drafted tokens of a path that a round verifies."
)
COMPARISON_CAPTION = (
    "Speed-up over off, decoding alone. predicted: at the costs that probes had in the same turns; of auto, to be as "
    "fast as the best setting. measured: in turns with off, on the texts of the prediction; of each prompt the median "
    "of the repeats (in brackets: single repeats, lowest to highest)."
)
SPACELIKE_NOTE = (
    "Spacelike has no row: it continues with what the service has said before, which no pair of models decides; "
    "`outrider bench papers --papers Takeoff` measures it."
)
NEEDS_MODELS = (
    "Acceptance by position, costs of forwards and predictions need the two models: name them with --target and "
    "--draft instead of --address."
)


def report_of(results: Mapping[str, Any]) -> Report:
    """Makes the report of what results.json keeps."""
    config = results["config"]
    run = f"{run_line(config)}; {results['duration_s'] / 60:.1f} minutes"
    notes = notes_of(results, interrupted="The run did not come to its end: what is missing was not measured.")
    pairs = results["pairs"]
    for pair in pairs:
        notes += [f"{pair['title']}, {label} failed: {reason}" for label, reason in pair["failures"].items()]
    chapters = [chapter for pair in pairs for chapter in chapters_of(pair, is_alone=len(pairs) == 1)]
    if results["claims"]:
        chapters.insert(0, Chapter("Prediction and measurement", [claims_table(results["claims"])]))
    return Report(
        "Is this pair worth it?",
        environment_lines(results, run),
        [*notes, *([NEEDS_MODELS] if config["address"] else [])],
        chapters,
        summary_of(results),
    )


def summary_of(results: Mapping[str, Any]) -> str:
    """Says which setting is the best at each temperature, and how good the predictions are."""
    lines = []
    for pair in results["pairs"]:
        word = "expected" if pair["predictions"] else "measured"
        for best in pair["best"]:
            flags = f"{best['flags']} --temperature {best['temperature']:g}"
            lines.append(f"{pair['title']}: {best['speedup']:.2f}x {word} with {flags}")
    if verdicts := Counter(one["verdict"] for one in results["claims"]):
        counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in (MET, MISSED, INCONCLUSIVE))
        lines.append(f"predictions within {TOLERANCE:.0%}: {counts}")
    return "; ".join(lines)


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a row for each prediction."""
    rows = [
        [
            f"{one['pair']}, {one['method']} {one['setting']}".strip(),
            f"{one['temperature']:g}",
            number_cell(one["predicted"], 2, "x"),
            number_cell(one["measured"], 2, "x"),
            percent_cell(one["error"]),
            NONE if one["interval"] is None else "–".join(percent_cell(bound) for bound in one["interval"]),
            one["verdict"],
        ]
        for one in claims
    ]
    return Table("", ("prediction", "T", "predicted", "measured", "off by", "95 %", "verdict"), rows)


def chapters_of(pair: Mapping[str, Any], *, is_alone: bool) -> list[Chapter]:
    """Makes the chapters of one pair; their titles name it if there are several pairs."""
    prefix = "" if is_alone else f"{pair['title']}: "
    models = f"Target {pair['target']}, draft {pair['draft']}."
    found = []
    if pair["acceptances"]:
        acceptances = pair["acceptances"]
        tables = [acceptance_table(acceptances), *category_tables(acceptances)]
        found.append(Chapter(f"{prefix}acceptance", tables, [models]))
    if pair["costs"]:
        found.append(Chapter(f"{prefix}costs", costs_tables(pair["costs"]), [costs_sentence(pair["costs"])]))
    if pair["predictions"]:
        tables = [
            best_table(pair["best"]),
            prediction_table(pair["predictions"], "speedup", "Speed-up over off"),
            prediction_table(pair["predictions"], "tokens_per_round", "Tokens of a round"),
        ]
        found.append(Chapter(f"{prefix}predictions", tables, [SPACELIKE_NOTE, *stand_in_sentences(pair)]))
    if pair["comparisons"]:
        tables = [comparison_table(pair)]
        # Without predictions, the best setting has no table of its own yet.
        tables += [] if pair["predictions"] else [best_table(pair["best"])]
        sentences = [*later_sentences(pair), EXPERIMENT_CAPTION]
        tables.append(experiment_table("All of it", pair["rows"]))
        found.append(Chapter(f"{prefix}measured", tables, sentences))
    return found


def acceptance_table(acceptances: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a row for each temperature and rule, a column for each position."""
    num_positions = min(SHOWN_POSITIONS, max(len(one["by_position"]) for one in acceptances))
    positions = [str(place + 1) for place in range(num_positions)]
    rows = [
        [
            f"{one['temperature']:g}",
            one["rule"],
            *(number_cell(alpha, 2) for alpha in one["by_position"][:num_positions]),
            number_cell(one["mean"], 2),
            number_cell(one["tokens_per_round"], 2),
        ]
        for one in acceptances
        if one["category"] == ALL_CATEGORIES
    ]
    columns = ("T", "rule", *positions, "alpha", "tokens")
    return Table("", columns, rows, ACCEPTANCE_CAPTION, frozenset({"rule"}), frozenset({"rule"}))


def category_tables(acceptances: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Makes a row for each temperature and rule, a column for each category; none if there is one category only."""
    alphas = {(one["temperature"], one["rule"], one["category"]): one["mean"] for one in acceptances}
    categories = [name for name in dict.fromkeys(one["category"] for one in acceptances) if name != ALL_CATEGORIES]
    kinds = dict.fromkeys((one["temperature"], one["rule"]) for one in acceptances)
    rows = [[f"{t:g}", rule, *(number_cell(alphas[t, rule, name], 2) for name in categories)] for t, rule in kinds]
    columns = ("T", "rule", *categories)
    table = Table("Alpha by category", columns, rows, "", frozenset({"rule"}), frozenset({"rule"}))
    return [table] if len(categories) > 1 else []


def costs_tables(costs: Mapping[str, Any]) -> list[Table]:
    """Makes a table of forwards by rows, and one of a round's other costs."""
    target, draft = costs["target_ms"], costs["draft_ms"]
    first = target["1"]
    rows = [
        [count, number_cell(ms, 2), number_cell(ms / first, 2), number_cell(draft.get(count), 2)]
        for count, ms in target.items()
    ]
    names = {
        "plain_ms": "target forward in the service, one row",
        "turn_slowdown": "factor of a forward that waits for the draft first",
        "ahead_slowdown": "factor of a forward beside which drafts are made",
        "step_ms": "draft forward in the service, with all that is done for a node",
        "one_way_ms": "message between the services",
        "plain_overhead_ms": "round of off, beside its forward",
        "turn_overhead_ms": "round of speculative, beside forward and waiting",
        "ahead_overhead_ms": "round while drafts come in, beside forward and waiting",
        "plain_stretch": "factor of all that: mean by median of a round of off",
        "turn_stretch": "of speculative",
        "ahead_stretch": "of a round while drafts come in",
    }
    others = [[text, number_cell(costs[name], 2)] for name, text in names.items()]
    columns = ("rows", "target ms", "x one row", "draft ms")
    return [
        Table("Forwards, what they take of a core", columns, rows),
        Table("A round's other costs", ("what", "ms, or factor"), others),
    ]


def costs_sentence(costs: Mapping[str, Any]) -> str:
    """Says the speed ratio of the two models."""
    return (
        f"C = {costs['speed_ratio']:.1f}: forwards of the draft model that fit into one of the target, one row each; "
        "medians of forwards in turns."
    )


def prediction_table(predictions: Sequence[Mapping[str, Any]], field: str, title: str) -> Table:
    """Makes a row for each method and temperature, a column for each length of a chain; cells have one field."""
    counts = list(dict.fromkeys(one["num_speculative_tokens"] for one in predictions))
    cells = {
        (one["temperature"], one["method"], one["num_speculative_tokens"]): number_cell(one[field], 2)
        for one in predictions
    }
    kinds = list(dict.fromkeys((one["temperature"], one["method"]) for one in predictions))
    rows = [[f"{t:g}", method, *(cells.get((t, method, count), "") for count in counts)] for t, method in kinds]
    columns = ("T", "method", *(f"γ {count}" for count in counts))
    return Table(title, columns, rows, PREDICTION_CAPTION, frozenset({"method"}), frozenset())


def best_table(best: Sequence[Mapping[str, Any]]) -> Table:
    """Names the best setting at each temperature by the flags to type."""
    rows = [[f"{one['temperature']:g}", number_cell(one["speedup"], 2, "x"), one["flags"]] for one in best]
    return Table("The best setting", ("T", "speed-up", "flags"), rows, "", frozenset({"flags"}), frozenset())


def comparison_table(pair: Mapping[str, Any]) -> Table:
    """Compares measured with predicted values: speed-ups, and tokens, which no load of the machine changes."""
    measured = {
        (row["method"], row["setting"], row["temperature"]): row["mean_acceptance_length"]
        for row in pair["rows"]
        if row["category"] == ALL_CATEGORIES
    }
    predicted = {
        (one["method"], f"gamma = {one['num_speculative_tokens']}", one["temperature"]): one["tokens_per_round"]
        for one in pair["later_predictions"]
    }
    keys = [(one["method"], one["setting"], one["temperature"]) for one in pair["comparisons"]]
    cells = [
        [
            f"{one['method']} {one['setting']}".strip(),
            f"{one['temperature']:g}",
            number_cell(one["predicted"], 2),
            f"{one['measured']:.2f} ({min(one['measured_runs']):.2f}–{max(one['measured_runs']):.2f})",
            percent_cell(one["error"]),
            number_cell(predicted.get(key), 2),
            number_cell(measured.get(key), 2),
        ]
        for one, key in zip(pair["comparisons"], keys, strict=True)
    ]
    columns = ("method", "T", "predicted", "measured", "off by", "tokens predicted", "tokens measured")
    return Table("", columns, cells, COMPARISON_CAPTION)


def stand_in_sentences(pair: Mapping[str, Any]) -> list[str]:
    """Says which model was replayed instead of the draft, if any."""
    if not pair["stand_in"]:
        return []
    return [f"Replayed with {pair['stand_in']}, which says what {pair['draft']} says in less time."]


def later_sentences(pair: Mapping[str, Any]) -> list[str]:
    """Says if the machine was as fast during the measurements as when the costs were probed."""
    before, later = pair["costs"], pair["later_costs"]
    if not before or not later:
        return []
    first, second = (one["plain_ms"] + one["plain_overhead_ms"] for one in (before, later))
    return [
        f"A round of off took {second:.1f} ms in these turns, and {first:.1f} ms when costs were probed for the grid "
        "of predictions; far apart, the machine had other work."
    ]
