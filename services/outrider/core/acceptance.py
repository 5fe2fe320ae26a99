"""The ratio rule: speculative sampling (Leviathan, Kalman, Matias 2023, algorithm 1; Chen et al. 2023), on numbers.

A drafted token x that was drawn from q is kept with probability min(1, p(x) / q(x)), p being the target's distribution
after all filters. The first refused one is replaced by a draw from the residual, max(0, p - q) renormalised; a chain
that is kept whole is followed by one draw from p. A token that was picked, not drawn, has the one-hot q: it is kept
with probability p(x), and the residual is p without x. The text then has exactly the target's distribution, on three
conditions:

* x was drawn from q. The target cannot check that: a drafter that sends another q changes the text's distribution. So a
  draft is drawn from small integer weights, and the same integers are sent (`SparseRow`).
* Whether x is tested does not depend on x. So the probability of a token in a chain must not decide where the chain
  ends or when a message is sent (`DraftTree.best_chain`, `outrider.core.methods.chain`).
* Every random number is used once and is independent of the others: the draft's (`outrider.core.acceptance`), one
  uniform for each output index, and the target's Gumbel noise for the next token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from outrider.core.growth import Candidate, Expansion
from outrider.core.noise import acceptance_uniform
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, SparseRow, TokenId, path_to

MAX_ROW_LEN = 64
"""Most tokens that a draft is drawn from: a row of the wire then has at most 260 bytes with a small vocabulary,
and some 300 with a large one. Half as many would halve that, and cost 4 % of the tokens that are kept."""
TOTAL_WEIGHT = 2**12
"""About the sum of a row's weights. With 16 bits instead of 12 a row is a fifth longer, and not one token in a thousand
more is kept. Tokens too improbable for a weight are not drawn, and take no bytes."""
LEAST_SUM = 1e-300
"""Probabilities with a smaller sum cannot be scaled to weights: the factor would be infinite soon after."""


class Drafted(Protocol):
    """A drafted token that is judged: a node, or a candidate."""

    @property
    def token_id(self) -> TokenId: ...

    @property
    def q(self) -> SparseRow | None: ...


def decides_by_ratio(sampling: SamplingParams, speculation: SpeculationParams) -> bool:
    """Returns true if drafts are drawn and judged by the ratio rule. At temperature 0 both rules agree, without q."""
    return speculation.is_ratio and not sampling.is_greedy


# The draft's side.


def sparse_row(
    token_ids: Sequence[TokenId], probabilities: Sequence[float], bias: float = 1.0, num_biased: int = 0
) -> SparseRow:
    """Returns the distribution that a draft is drawn from: the most probable tokens, with integer weights.

    Args:
        token_ids: At least one, the most probable first. Tokens that are too improbable for a weight are left out.
        probabilities: In parallel; of any sum from `LEAST_SUM` on. All but the first may be 0.
        bias: SAGUARO sampling, section 4.2 (C): factor of the first `num_biased` probabilities (F). Where it leaves
            nothing, it counts as 1.
    """
    kept = list(probabilities[:MAX_ROW_LEN])
    if bias < 1.0:
        biased = [bias * probability for probability in kept[:num_biased]] + kept[num_biased:]
        # With a bias of 0 the sum may vanish: all tokens are biased, or all others underflow, as at a low temperature.
        if sum(biased) >= LEAST_SUM:
            kept = biased
    scale = TOTAL_WEIGHT / sum(kept)
    # Not empty: the greatest of at most 64 shares has a weight of 64 or more. `token_ids` may be longer.
    pairs = [(t, weight) for t, p in zip(token_ids, kept, strict=False) if (weight := round(scale * p)) > 0]
    return SparseRow([t for t, _ in pairs], [weight for _, weight in pairs])


def drawn_from(row: SparseRow, word: int) -> tuple[TokenId, int]:
    """Returns a token drawn with exactly the row's probabilities, and its weight.

    Args:
        row: The distribution.
        word: Uniform in [0, 2**64).

    Raises:
        ValueError: `word` is outside its range.
    """
    # A fixed-point product: its bias is below total / 2**64, less than that of the weights' own rounding.
    place = (word * row.total) >> 64
    for token_id, weight in zip(row.token_ids, row.weights, strict=True):
        place -= weight
        if place < 0:
            return token_id, weight
    raise ValueError(f"word must be in [0, 2**64), got {word}")


def sampled_candidates(
    row: SparseRow, token_ids: Sequence[TokenId], logprobs: Sequence[float], word: int, k: int
) -> list[Candidate]:
    """Returns a token drawn from the row, and at most k - 1 others, the most probable first, as picks.

    Args:
        row: The distribution.
        token_ids: The most probable first.
        logprobs: In parallel; the draft model's, not biased.
        word: Uniform in [0, 2**64), and used for nothing else.
        k: Most candidates.
    """
    drawn, weight = drawn_from(row, word)
    # The drawn token's probability is that of the row, bias included; those of picks are the model's own.
    candidates = [Candidate(drawn, math.log(weight / row.total), row)]
    # One more than is missing, because the drawn token may be among them.
    for token_id, logprob in zip(token_ids[:k], logprobs[:k], strict=True):
        if token_id != drawn and len(candidates) < k:
            candidates.append(Candidate(token_id, logprob))
    return candidates


# The target's side.


def first_refused(
    target_probabilities: Sequence[float], chain: Sequence[Drafted], seed: int, first_output_index: int
) -> int:
    """Returns how many tokens of a chain come before the first refused one: all, if none is refused.

    Args:
        target_probabilities: p of each token of the chain, after those before it.
        chain: In parallel.
        seed: The generation's.
        first_output_index: Tokens that the generation put out before the chain.
    """
    for index, (probability, drafted) in enumerate(zip(target_probabilities, chain, strict=True)):
        if refusal_bound(drafted, seed, first_output_index + index) >= probability:
            return index
    return len(chain)


def refusal_bound(drafted: Drafted, seed: int, output_index: int) -> float:
    """Returns u q, the greatest p with which a drafted token is refused: u >= p / q without the division, as q may be
    small."""
    return acceptance_uniform(seed, output_index) * claimed_probability(drafted)


def claimed_probability(drafted: Drafted) -> float:
    """Returns q of a drafted token: 1 for one that was picked, or that its row lacks and so was not drawn."""
    return 1.0 if drafted.q is None else drafted.q.probability(drafted.token_id) or 1.0


def claimed_row(drafted: Drafted) -> SparseRow:
    """Returns the whole row q: the one-hot row for a token that was picked, or that its row lacks."""
    row = drafted.q
    if row is None or drafted.token_id not in row.token_ids:
        return SparseRow((drafted.token_id,), (1,))
    return row


class DraftNoise:
    """Makes the random words of one session's drafts. A context always has the same word, whatever part of it is
    committed, so a chain that is drafted again is the same chain."""

    def __init__(self, seed: int) -> None:
        key = seed.to_bytes(8, "little")
        # `person` (16 bytes at most) keeps these words independent of the seed's other uses: a draft that correlates
        # with the acceptance uniforms or the Gumbel noise would change the text's distribution.
        self._hash = hashlib.blake2b(digest_size=8, key=key, person=b"outrider draft")
        self._num_hashed = 0

    def words(self, tree: DraftTree, expansion: Expansion) -> list[int]:
        """Returns a word for each draw that an expansion's logits are for: uniform in [0, 2**64).

        The first ones are for the nodes, one each, then one for each token of the phrase.
        """
        committed = tree.committed
        # Committed tokens are never taken back, so the hash is incremental: a call costs the new tokens, not the whole
        # text.
        if self._num_hashed < len(committed):
            self._hash.update(_bytes(committed[self._num_hashed :]))
            self._num_hashed = len(committed)
        words, path = [], list[TokenId]()
        for node in expansion.nodes:
            path = path_to(node, tree.root)
            words.append(self._word(path))
        # A phrase follows the only node of its expansion, with which `path` ends.
        for token_id in expansion.phrase:
            path.append(token_id)
            words.append(self._word(path))
        return words

    def _word(self, path: Sequence[TokenId]) -> int:
        # A hash of hashlib can be copied and updated after `digest`.
        if not path:
            return int.from_bytes(self._hash.digest(), "little")
        context = self._hash.copy()
        context.update(_bytes(path))
        return int.from_bytes(context.digest(), "little")


def _bytes(token_ids: Sequence[TokenId]) -> bytes:
    # Of fixed width and byte order: different contexts have different bytes, and every machine draws the same words.
    return np.asarray(token_ids, dtype="<u4").tobytes()
