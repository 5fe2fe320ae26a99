"""The report of the GPU suite: rates and times of services, of other programs for comparison, and of single parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from outrider_bench.config import GPU_PARTS
from outrider_bench.gpu.generations import sources_in_words
from outrider_bench.report import Chapter, Report, Table, environment_lines, notes_of, number_cell

CPU_NOTE = "Measured on a CPU: this shows that everything works, not how fast a GPU is."
WEIGHTS = {
    "widened": "Weights: the demo pair in the corner of models of these sizes. Texts and acceptance are those of the "
    "small pair, up to 2048 tokens; the cost is that of the large one.",
    "random": "Weights: random. What a token costs is right, what a draft brings is not: rates of methods that draft "
    "mean nothing.",
}
SERVICES_CAPTION = (
    "tok/s: of all sessions together, decoding alone; x off: beside `off` with as many sessions. round, forward, wait, "
    "overhead: ms of a round, as the verifier reports them; draft: of a forward of the draft model. tok/round: the "
    "target's own included. TTFT: ms. equal: texts that are those of `off` alone, of those compared. Medians over "
    "repeats."
)
PEERS_CAPTION = (
    "The same weights and prompts in one process, greedy, one text at a time. equal: texts that are those of our "
    "`off`; in bfloat16 other programs round elsewhere, so that near ties fall otherwise. On a GPU transformers "
    "compiles the model where its cache is static, and the plain loop is a CUDA graph."
)
MICRO_SENTENCES = (
    "Products: those of all layers, back to back, and the weights that they read. A draw takes its copy to the host "
    "along.",
    "Sessions: a forward of one row for each. KV: keys and values that are read beyond those of 64 tokens. Step: one "
    "of several of the draft model in one graph, with what the host does for them.",
    "Fused products: all layers of a model whose rows need not be exact, with a norm, a gate or a sum in the kernel of "
    "each product, beside those of a library. The faster ones are used.",
)


def report_of(results: Mapping[str, Any]) -> Report:
    """Makes the report of what results.json keeps."""
    config = results["config"]
    memory = f", {results['memory_gib']:.0f} GiB" if results["memory_gib"] else ""
    run = (
        f"{results['device']}{memory}; sizes {config['size']}, {config['weights']}, {results['dtype']}; drafter: "
        f"{config['drafter']}; {config['max_tokens']} tokens each, {config['repeats']} repeats, seed {config['seed']}; "
        f"{results['duration_s'] / 60:.1f} minutes"
    )
    notes = [CPU_NOTE] if results["device"] == "CPU" else []
    notes += notes_of(results, interrupted="The run did not come to its end: what is missing was not measured.")
    if results["exact_off_reason"]:
        notes.append(f"Texts may differ between methods in near ties: {results['exact_off_reason']}")
    if results["left_out"]:
        budget, names = f"{config['minutes']:g} minutes", ", ".join(results["left_out"])
        notes.append(f"Left out, for the budget of {budget} where nothing else is said: {names}")
    by_part = {part: [one for one in results["cells"] if one["part"] == part] for part in GPU_PARTS}
    chapters = []
    if by_part["services"]:
        sentences = [WEIGHTS[config["weights"]], f"Retrieval: from the session itself ({sources_in_words()})."]
        sentences += _chosen(by_part["services"]) + _drift(results["anchors"])
        tables = [services_table(by_part["services"], context) for context in _contexts(by_part["services"])]
        chapters.append(Chapter("Services", tables, sentences))
    if by_part["peers"]:
        chapters.append(Chapter("Other programs", [peers_table(by_part["peers"])]))
    if by_part["micro"]:
        tables = [table for one in by_part["micro"] for table in micro_tables(one)]
        chapters.append(Chapter("Single parts", tables, MICRO_SENTENCES))
    return Report(f"A pair on {results['device']}", environment_lines(results, run), notes, chapters)


def services_table(cells: Sequence[Mapping[str, Any]], context: int) -> Table:
    """Makes a row for each method, number of sessions and temperature, of one context."""
    groups = grouped(one for one in cells if one["context"] == context)
    rows = []
    for (label, temperature, sessions), values in groups.items():
        rate, off = rate_of(values), rate_of(groups.get(("off", temperature, sessions), []))
        times = {name: _median(one["times_ms"].get(name) for one in values) for name in values[0]["times_ms"]}
        shown = ("round_ms", "forward_ms", "draft_forward_ms", "wait_ms", "overhead_ms")
        rows.append(
            [
                f"{label}{' (degraded)' if any(one['degraded'] for one in values) else ''}",
                str(sessions),
                f"{temperature:g}",
                number_cell(rate, 1),
                number_cell(rate / off if rate and off else None, 2),
                *(number_cell(times.get(name), 2) for name in shown),
                number_cell(_median(one["tokens_per_round"] for one in values), 2),
                number_cell(_median(one["ttft_ms"] for one in values), 0),
                equal_cell(values),
            ]
        )
    columns = ("method", "at once", "T", "tok/s", "x off", "round", "forward", "draft", "wait", "overhead", "tok/round")
    return Table(f"Prompts of {context} tokens", (*columns, "TTFT", "equal"), rows, SERVICES_CAPTION)


def peers_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Makes a row for each other program's way to decode."""
    rows = [
        [
            label,
            number_cell(rate_of(values), 1),
            number_cell(_median(one["tokens_per_round"] for one in values), 2),
            number_cell(_median(one["ttft_ms"] for one in values), 0),
            equal_cell(values),
        ]
        for (label, _, _), values in grouped(cells).items()
    ]
    return Table("", ("program", "tok/s", "tok/forward", "TTFT", "equal"), rows, PEERS_CAPTION)


def micro_tables(cell: Mapping[str, Any]) -> list[Table]:
    """Makes a table by rows and one by sessions, of one model and context, and one of products that may be fused."""
    value, title = cell["value"], f"{cell['label']}, context {cell['context']}"
    rows = [
        [
            count,
            number_cell(ms, 3),
            number_cell(value["products_ms"].get(count), 3),
            number_cell(value["products_gb_per_s"].get(count), 0),
            *(number_cell(draws.get(count), 0) for draws in value["draw_us"].values()),
        ]
        for count, ms in value["forward_ms"].items()
    ]
    draws = [f"draw us, T = {temperature}" for temperature in value["draw_us"]]
    steps = value.get("steps_ms", {})
    sessions = [
        [count, number_cell(ms, 3), number_cell(value["kv_gb_per_s"].get(count), 0)]
        + ([number_cell(steps.get(count), 3)] if steps else [])
        for count, ms in value["sessions_ms"].items()
    ]
    columns = ("rows", "forward ms", "products ms", "products GB/s", *draws)
    return [
        Table(f"{title}: rows of one session", columns, rows),
        Table(f"{title}: sessions", ("sessions", "forward ms", "KV GB/s", *(["step ms"] if steps else [])), sessions),
    ]


def grouped(cells: Any) -> dict[tuple[str, float, int], list[Mapping[str, Any]]]:
    """Returns the values of cells by label, temperature and sessions, over repeats."""
    found: dict[tuple[str, float, int], list[Mapping[str, Any]]] = {}
    for one in cells:
        found.setdefault((one["label"], one["temperature"], one["sessions"]), []).append(one["value"])
    return found


def rate_of(values: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the median of the rates."""
    return _median(one["tokens_per_s"] for one in values)


def equal_cell(values: Sequence[Mapping[str, Any]]) -> str:
    """Counts the texts that equal those of `off` alone, over all repeats."""
    known = [one for one in values if one["num_equal"] is not None]
    return f"{sum(one['num_equal'] for one in known)}/{sum(one['num_compared'] for one in known)}" if known else ""


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _contexts(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({one["context"] for one in cells})


def _chosen(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says what `auto` chose in what share of its rounds, for each number of concurrent generations, in all
    contexts."""
    sentences = []
    for (label, temperature, sessions), values in grouped(cells).items():
        if label == "auto":
            rounds = sum((Counter(one.get("decisions", {})) for one in values), Counter[str]())
            if not rounds:
                continue
            shares = ", ".join(f"{name} {count / rounds.total():.0%}" for name, count in rounds.most_common())
            sentences.append(f"`auto`, {sessions} at once, T = {temperature:g}, chose, in rounds: {shares}.")
    return sentences


def _drift(anchors: Sequence[Mapping[str, Any]]) -> list[str]:
    rates = [one["tokens_per_s"] for one in anchors if one["tokens_per_s"]]
    if len(rates) < 2:
        return []
    return [
        f"`off` alone, {len(rates)} times during the run: {min(rates):.1f} to {max(rates):.1f} tokens/s; far apart, "
        "the machine had other work or got warm."
    ]
