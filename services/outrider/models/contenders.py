"""The best perturbed scores of large vocabularies on a CPU: noise only for tokens that can be among them.

A row is folded into columns: of every column first only the largest logit is looked at. The steps:

1. The columns with the largest logits give a floor: the k-th best of their perturbed scores.
2. A token's noise is below `QUIET`, unless its hash is among the highest. Those tokens are found by the inverse of the
   hash. Of the others only columns matter whose largest tempered logit comes within `QUIET` of the floor.
3. Their tokens are hashed, without a look at their logits. A column's largest one says how high a hash must be.
4. The few tokens that are left get their score, by the same float32 operations as in a row that is computed whole.

So results are the same bits as of the whole row. What is approximate (floor, bounds) errs to the safe side by
`SLACK`, and decides only who is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
import numpy.typing as npt

from outrider.core.noise import FMIX32, LOWBIAS32, LoudTokens, gumbel_of_words, hashed
from outrider.models.kernels import Kernel

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.intp]
Best = tuple[list[int], list[float]]
"""The best token ids of a row, and their scores."""

DEPTH = 32
"""Tokens of a column. More make a shorter list of columns, and more hashes that are computed for nothing."""
NUM_FIRST = 32
"""Columns that the floor is found in."""
NUM_LOUD_WORDS = 4096
QUIET = float(gumbel_of_words(np.array([2**32 - NUM_LOUD_WORDS], dtype=np.uint32))[0])
"""Noise of the least loud word: all lower words have less."""
CHUNK_COLUMNS = 2048
"""Columns that are hashed at a time, so that the words stay in the CPU's cache."""
SLACK = 1e-4, 2.0**-20
"""Absolute and relative allowance for what is approximate. Errors are below 1e-5 and 2**-23; a larger allowance only
makes that a few more tokens are looked at."""


# The compiler takes these as they are: an element of a tuple of Python's would be a number of 64 bits.
_SHIFT_1, _FACTOR_1, _SHIFT_2, _FACTOR_2, _SHIFT_3 = (np.uint32(constant) for constant in LOWBIAS32)
_SHIFT_4, _FACTOR_3, _SHIFT_5, _FACTOR_4, _SHIFT_6 = (np.uint32(constant) for constant in FMIX32)


@Kernel
def hash_columns(
    starts: Words,
    columns: Words,
    first_keys: Words,
    second_keys: Words,
    least: Words,
    words: Words,
    is_found: npt.NDArray[np.bool_],
) -> None:  # pragma: no cover
    """Hashes the tokens of columns as `hashed` does, and finds the words that are high enough.

    Args:
        starts: uint32 [depth]: token id of the first column at each level.
        columns: uint32 [columns]: the number of each.
        first_keys: uint32 [columns]: first words of their rows' keys.
        second_keys: uint32 [columns]: second words.
        least: uint32 [columns]: the least word that is wanted of each.
        words: uint32 [columns, depth], written.
        is_found: bool [columns, depth], written.
    """
    depth = len(starts)
    for number in numba.prange(len(columns)):
        column, bound = columns[number], least[number]
        first, second = first_keys[number], second_keys[number]
        own, found = words[number], is_found[number]
        # Back to 32 bits after every step: the compiler widens integers otherwise.
        for level in range(depth):
            word = np.uint32(np.uint32(starts[level] + column) ^ first)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_1)) * _FACTOR_1)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_2)) * _FACTOR_2)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_3)) ^ second)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_4)) * _FACTOR_3)
            word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_5)) * _FACTOR_4)
            word = np.uint32(word ^ np.uint32(word >> _SHIFT_6))
            own[level] = word
            found[level] = word >= bound


class Contenders:
    """Finds the best perturbed scores of rows, for one vocabulary size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        depth = max(1, min(DEPTH, vocab_size // NUM_FIRST))
        self._num_columns = -(-vocab_size // depth)
        # The last level reaches back into the one before where the vocabulary is no multiple of the depth.
        starts = np.minimum(np.arange(depth) * self._num_columns, vocab_size - self._num_columns)
        self._starts = starts.astype(np.uint32)[:, None]
        self._overlap = depth * self._num_columns - vocab_size
        self._loud = LoudTokens(NUM_LOUD_WORDS)
        # Kept: new ones of this size would cost as much as what is written into them.
        self._words = np.empty((CHUNK_COLUMNS, depth), dtype=np.uint32)
        self._is_found = np.empty((CHUNK_COLUMNS, depth), dtype=np.bool_)

    def best(self, logits: Floats, temperatures: Floats, keys: Words, k: int) -> list[Best | None]:
        """Finds the k best of `logits / temperature + noise`.

        Args:
            logits: float32 [rows, vocab].
            temperatures: float32 [rows, 1], above 0 and finite.
            keys: uint32 [rows, 2], from `outrider.core.noise.row_key`.
            k: At most the vocabulary size.

        Returns:
            For each row k token ids and their scores, the best first, equals by the lower id. None if no finite score
            is the k-th best: then all tokens must be looked at.
        """
        # Infinities are cared for below, by being compared.
        with np.errstate(all="ignore"):
            peaks = self._peaks(logits) / temperatures
            floors = self._floors(logits, peaks, temperatures, keys, k)
            found = [*self._over_floors(peaks, floors, keys), self._loud.find(keys, self.vocab_size)]
            rows, token_ids, words = (np.concatenate(parts) for parts in zip(*found, strict=True))
            scores = logits[rows, token_ids] / temperatures[rows, 0] + gumbel_of_words(words)
        order = np.lexsort((token_ids, -scores, rows))
        rows, token_ids, scores = rows[order], token_ids[order], scores[order]
        if k > 1:
            # A token is found twice if it is loud and in a column, or in two columns.
            once = np.ones(len(rows), dtype=np.bool_)
            once[1:] = (rows[1:] != rows[:-1]) | (token_ids[1:] != token_ids[:-1])
            rows, token_ids, scores = rows[once], token_ids[once], scores[once]
        firsts = np.searchsorted(rows, np.arange(len(logits))).tolist()
        return [
            (token_ids[first : first + k].tolist(), scores[first : first + k].tolist()) if np.isfinite(floor) else None
            for first, floor in zip(firsts, floors, strict=True)
        ]

    def _peaks(self, logits: Floats) -> Floats:
        """Finds the largest logit of every column: float32 [rows, columns]."""
        last = self.vocab_size - self._num_columns
        peaks = logits[:, last:].copy()
        num_levels = len(self._starts) - 1
        if num_levels:
            for row, row_peaks in zip(logits, peaks, strict=True):
                levels = row[: num_levels * self._num_columns].reshape(num_levels, self._num_columns)
                np.maximum(row_peaks, levels.max(0), out=row_peaks)
        return peaks

    def _floors(
        self, logits: Floats, peaks: Floats, temperatures: Floats, keys: Words, k: int
    ) -> npt.NDArray[np.float64]:
        """Finds for each row a score that at least k tokens reach: float64 [rows], infinite if there is none."""
        num_first = min(max(NUM_FIRST, k), self._num_columns)
        columns = np.argpartition(peaks, self._num_columns - num_first)[:, self._num_columns - num_first :]
        token_ids = self._starts + columns[:, None].astype(np.uint32)
        words = hashed(token_ids, keys[:, :1, None], keys[:, 1:, None])
        # -log(-log u) is at least log(u / (1 - u)). One logarithm in float32 is a fraction of the exact noise's price.
        noise = np.log(words.astype(np.float32) / ((~words).astype(np.float32) + np.float32(0.5)))
        values = logits[np.arange(len(logits))[:, None, None], token_ids]
        scores = (values / temperatures[:, None] + noise).reshape(len(logits), -1)
        # A token of two columns would count twice.
        rank = min(2 * k if self._overlap else k, scores.shape[1])
        floors = np.partition(scores, scores.shape[1] - rank)[:, scores.shape[1] - rank].astype(np.float64)
        absolute, relative = SLACK
        floors -= absolute + relative * np.abs(floors)
        return np.where(np.isfinite(floors), floors, np.inf)

    def _over_floors(
        self, peaks: Floats, floors: npt.NDArray[np.float64], keys: Words
    ) -> Iterator[tuple[Indices, Words, Words]]:
        """Yields row, token id and word of the tokens that may reach their row's floor, but for loud ones."""
        # Back in float32, because numpy is slow to compare it with float64. The slack allows for that.
        over = peaks >= (floors - QUIET).astype(np.float32)[:, None]
        # Here and below of flat arrays: `nonzero` of two dimensions takes ten times as long.
        all_rows, all_columns = np.divmod(np.flatnonzero(over), self._num_columns)
        # -log(-log u) is at most -log(1 - u), so 1 - u must be no more than this.
        most = np.exp(np.minimum(peaks[all_rows, all_columns] - floors[all_rows], 0))
        # The word is 2**32 u - 0.5, and one less for what is rounded here.
        all_least = np.maximum(2.0**32 * (1 - most) - 2, 0).astype(np.uint32)
        starts, depth = self._starts[:, 0], len(self._starts)
        for start in range(0, len(all_rows), CHUNK_COLUMNS):
            chunk = slice(start, start + CHUNK_COLUMNS)
            rows, columns = all_rows[chunk], all_columns[chunk].astype(np.uint32)
            words, is_found = self._words[: len(rows)], self._is_found[: len(rows)]
            hash_columns(starts, columns, keys[rows, 0], keys[rows, 1], all_least[chunk], words, is_found)
            found = np.flatnonzero(is_found)
            numbers, levels = np.divmod(found, depth)
            yield rows[numbers], starts[levels] + columns[numbers], words.ravel()[found]
