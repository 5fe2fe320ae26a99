"""The report of the suite of structured output: what masks cost, what drafts bring, and what else was asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.report import (
    EXPERIMENT_CAPTION,
    Chapter,
    Report,
    claims_tables,
    experiment_notes,
    experiment_table,
    experiments_environment,
    notes_of,
    of_part,
    summary_of_claims,
)

TITLES = {
    "mask": "A mask on the same text",
    "forced": "Text that is forced",
    "schemas": "Schemas",
    "texts": "Several texts of a prompt",
    "parameters": "Other parameters",
}
MASK_CAPTION = (
    "Values are ratios within a repeat. A mask is compared on texts that it leaves as they are, token for token: any "
    "text permits all of them; printable (ASCII without tabs), short lines (less than 100 characters) and lexemes (of "
    "Python) forbid some, and of those the texts count in which every draw was allowed. Without a filter a mask is "
    "made only where a draw is refused; with top_p for every token. No request ignores the end-of-sequence token."
)
_SENTENCES = {
    "mask": MASK_CAPTION,
    "forced": "Values are ratios within a repeat. Keys, constants and long enumerations: the grammar drafts them.",
    "schemas": "Values are ratios within a repeat. Every text is valid, and that of off.",
    "texts": "Values are ratios within a turn. Prompts begin differently: no cache has seen any of them.",
    "parameters": (
        "Values are ratios within a repeat. Penalties are too small to change a draw, and stop strings are never said: "
        "the texts are the same. logprobs: of each token and the five most probable ones."
    ),
}


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    interrupted = "The run did not come to its end: parts are missing."
    notes = notes_of(results, interrupted=interrupted, failed="{what}: {why}.")
    return Report(
        "Structured output, and what else a request asks",
        experiments_environment(results),
        [*notes, *experiment_notes(results["experiments"])],
        [_chapter(results, part) for part in results["config"]["parts"]],
        summary_of_claims(results["claims"]),
        results["checks"],
    )


def _chapter(results: Mapping[str, Any], part: str) -> Chapter:
    tables = [experiment_table(experiment) for experiment in of_part(results["experiments"], part)]
    sentences = [_SENTENCES[part], *([EXPERIMENT_CAPTION] if tables else [])]
    return Chapter(TITLES[part], [*claims_tables(results, part), *tables], sentences, pictures=[part])
