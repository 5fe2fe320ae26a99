"""Laws of texts: how probable each text of a few tokens is, and if texts follow such a law."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from scipy import stats
from torch import Tensor

Law: TypeAlias = dict[tuple[int, ...], float]
"""Probabilities of texts, by their token ids."""


def law_of(scores: Callable[[tuple[int, ...]], Tensor], length: int) -> Law:
    """Returns the law of all texts of some length.

    Args:
        scores: Returns the logits of the token that follows a text, one for each of the vocabulary. Most of them are
            minus infinity, so that the possible texts can be enumerated.
        length: Tokens of a text.
    """
    texts: Law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in texts.items():
            shares = scores(text).double().softmax(-1)
            for token_id in shares.nonzero()[:, 0].tolist():
                longer[*text, token_id] = probability * float(shares[token_id])
        texts = longer
    return texts


def only_best(logits: Tensor, k: int) -> Tensor:
    """Returns logits of which only the k highest are left."""
    best = logits.topk(k)
    return torch.full_like(logits, -torch.inf).scatter_(-1, best.indices, best.values)


def p_value(texts: Sequence[tuple[int, ...]], law: Mapping[tuple[int, ...], float], part: slice) -> float:
    """Returns the probability that a part (`part`: token positions) of texts of this law deviates as much as theirs, by
    a chi-square test that pools rare values."""
    counts = Counter(text[part] for text in texts)
    shares: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in law.items():
        shares[text[part]] += len(texts) * probability
    common = [value for value, share in shares.items() if share >= 5]
    found, wanted = [counts[value] for value in common], [shares[value] for value in common]
    if len(common) < len(shares):
        found.append(len(texts) - sum(found))
        wanted.append(len(texts) - sum(wanted))
    return float(stats.chisquare(found, wanted).pvalue)
