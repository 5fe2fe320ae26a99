"""Laws of texts: how probable each text of a few tokens is, and whether texts follow such a law."""

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
        scores: Returns the logits that the token behind a text is drawn by, one for each of the vocabulary, most of
            them minus infinity: the texts with the others are counted out.
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
    """Returns logits of which the k highest are left."""
    best = logits.topk(k)
    return torch.full_like(logits, -torch.inf).scatter_(-1, best.indices, best.values)


def p_value(texts: Sequence[tuple[int, ...]], law: Mapping[tuple[int, ...], float], part: slice) -> float:
    """Returns how probable it is that a part of the texts is as far from its law as it is: a chi-square test, rare
    values taken together."""
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
