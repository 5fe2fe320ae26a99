"""Acceptance by position in a chain, from texts of a target with which a draft model was compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_cli.prompts import ALL_CATEGORIES

SHARED_NOISE, OWN_CHOICE, RATIO = "match, shared noise", "match, own choice", "ratio rule, 1 - TV"
"""Rules by which a drafted token is kept, as the report names them."""
FIELDS = {SHARED_NOISE: ("shared_noise",) * 2, OWN_CHOICE: ("own_choice",) * 2, RATIO: ("kept", "overlap")}
"""For each rule, the fields of a watched text: how probably each token was a kept draft, and would be kept."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often a drafted token is kept, by its position in the chain."""

    category: str
    """Of the prompts; ALL_CATEGORIES for all of them."""
    temperature: float
    rule: str
    by_position: tuple[float | None, ...]
    """Shares at positions 1, 2, ... of the chains whose earlier tokens were kept. None if there was no such chain."""
    mean: float
    """Share of all tokens, whatever became of those before them: the single number alpha stands for it."""

    @property
    def tokens_per_round(self) -> float:
        """Returns the tokens of a round with a chain of all these positions, including the target's own token."""
        tokens, reached = 1.0, 1.0
        for alpha in self.by_position:
            reached *= alpha or 0.0
            tokens += reached
        return tokens

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "category": self.category,
            "temperature": self.temperature,
            "rule": self.rule,
            "by_position": list(self.by_position),
            "mean": self.mean,
            "tokens_per_round": self.tokens_per_round,
        }


def acceptances_of(
    texts: Sequence[Mapping[str, Any]], categories: Sequence[str], temperature: float, chain_len: int
) -> list[Acceptance]:
    """Returns the acceptance under each rule for texts that a worker has watched: of all, and of each category.

    Args:
        texts: The worker's answers.
        categories: Those of their prompts, one for each text.
        temperature: Of the sampling.
        chain_len: Drafted tokens of a round, at least 1.
    """
    found = []
    for category in (ALL_CATEGORIES, *dict.fromkeys(categories)):
        here = [text for text, its in zip(texts, categories, strict=True) if category in (ALL_CATEGORIES, its)]
        for rule, (kept, judged) in FIELDS.items():
            pairs = [(text[kept], text[judged]) for text in here]
            flat = [value for _, values in pairs for value in values]
            mean = sum(flat) / len(flat)
            found.append(Acceptance(category, temperature, rule, by_position(pairs, chain_len), mean))
    return found


def by_position(texts: Sequence[tuple[Sequence[float], Sequence[float]]], chain_len: int) -> tuple[float | None, ...]:
    """Replays rounds of draft-then-verify on texts, and counts at each position what is reached and what is kept.

    A round begins where the one before ended: after the first refused token, which is the target's, or after the
    target's own token that follows a chain that was kept whole. Under the ratio rule both are probabilities: a token x
    of the target was a kept draft with min(1, q(x)/p(x)), the maximal coupling of the two distributions (Leviathan et
    al. 2023, appendix A.1), so every place is the beginning of a round with some probability.

    Args:
        texts: Two lists for each text, with an entry for each token: the probability that it was a kept draft, and that
            a draft in its place is kept. Under a match rule both are 0 or 1, and equal.
        chain_len: Drafted tokens of a round, at least 1.

    Returns:
        For positions 1 to `chain_len`, the share kept among those reached.
    """
    reached, accepted = [0.0] * chain_len, [0.0] * chain_len
    for kept, judged in texts:
        begins = [1.0] + [0.0] * (len(kept) + 1)
        # Chains that would reach beyond the end are left out, because their last positions are unknown.
        for start in range(len(kept) - chain_len + 1):
            alive = begins[start]
            for offset in range(chain_len):
                place = start + offset
                reached[offset] += alive
                accepted[offset] += alive * judged[place]
                begins[place + 1] += alive * (1 - kept[place])
                alive *= kept[place]
            begins[start + chain_len + 1] += alive
    return tuple(kept / count if count else None for kept, count in zip(accepted, reached, strict=True))
