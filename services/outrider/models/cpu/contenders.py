"""The best perturbed scores of large vocabularies on a CPU: noise only for tokens that can be among them.

A row is folded into columns. At first only the largest logit of every column is looked at. The steps:

1. The column with the largest logit of each stretch gives a floor: the k-th best of their perturbed scores.
2. A token's noise is below `QUIET` unless its hash is among the highest. The tokens with the highest hashes are found
   by the inverse of the hash. Other tokens matter only in columns whose largest tempered logit comes within `QUIET` of
   the floor.
3. The tokens of these columns are hashed, without reading their logits. A column's largest logit tells how high a hash
   must be.
4. The few tokens that are left get their score, by the same float32 operations as in a row that is computed as a whole.

So results have the same bits as those of the whole row. Floor and bounds are approximate. They err on the safe side by
`SLACK`, and decide only which tokens are looked at.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from outrider.core.noise import FMIX32, LOWBIAS32, LoudTokens, gumbel_of_words
from outrider.models.cpu.kernels import Kernel, inlined
from outrider.models.draws import Best

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.intp]

DEPTH = 32
"""Tokens of a column. More tokens make fewer columns, and more wasted hashes."""
NUM_FIRST = 32
"""Columns that the floor is found in."""
NUM_LOUD_WORDS = 4096
QUIET = float(gumbel_of_words(np.array([2**32 - NUM_LOUD_WORDS], dtype=np.uint32))[0])
"""Noise of the least loud word: all lower words have less."""
SLACK = 1e-4, 2.0**-20
"""Absolute and relative allowance for approximations. Errors are below 1e-5 and 2**-23; with a larger allowance only a
few more tokens are looked at."""
STEPS = 16
"""Entries of `_LEAST_WORDS` for a unit of noise."""

# Entry j is the least word that can lift a column to the floor from j / STEPS to (j + 1) / STEPS below it. -log(-log u)
# is at most -log(1 - u), and the word is 2**32 u - 0.5, less one for rounding here.
_BELOW = np.arange(STEPS * (int(QUIET) + 2)) / STEPS
_LEAST_WORDS = np.maximum(2.0**32 * (1 - np.exp(-_BELOW)) - 2, 0).astype(np.uint32)

# The compiler keeps the type of these: an element of a Python tuple would become a 64-bit number.
_SHIFT_1, _FACTOR_1, _SHIFT_2, _FACTOR_2, _SHIFT_3 = (np.uint32(constant) for constant in LOWBIAS32)
_SHIFT_4, _FACTOR_3, _SHIFT_5, _FACTOR_4, _SHIFT_6 = (np.uint32(constant) for constant in FMIX32)


@inlined
def _hash_of(token_id: np.uint32, first_key: np.uint32, second_key: np.uint32) -> np.uint32:  # pragma: no cover
    """Hashes as `hashed` does. Back to 32 bits after every step: the compiler widens integers otherwise."""
    word = np.uint32(token_id ^ first_key)
    word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_1)) * _FACTOR_1)
    word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_2)) * _FACTOR_2)
    word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_3)) ^ second_key)
    word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_4)) * _FACTOR_3)
    word = np.uint32(np.uint32(word ^ np.uint32(word >> _SHIFT_5)) * _FACTOR_4)
    return np.uint32(word ^ np.uint32(word >> _SHIFT_6))


@Kernel
def score_first_columns(
    logits: Floats, peaks: Floats, temperatures: Floats, keys: Words, starts: Words, scores: Floats
) -> None:  # pragma: no cover
    """Scores the tokens in the column of each stretch that has the largest logit, with noise that is a little too low.

    Args:
        logits: float32 [rows, vocab].
        peaks: float32 [rows, columns]: the largest logit of each column, tempered.
        temperatures: float32 [rows, 1].
        keys: uint32 [rows, 2].
        starts: uint32 [depth]: token id of the first column at each level.
        scores: float32 [rows, stretches * depth], written.
    """
    depth, num_columns = len(starts), peaks.shape[1]
    num_stretches = scores.shape[1] // depth
    for row in numba.prange(len(logits)):
        own, first_key, second_key = peaks[row], keys[row, 0], keys[row, 1]
        temperature = temperatures[row, 0]
        for stretch in range(num_stretches):
            largest = stretch * num_columns // num_stretches
            for column in range(largest + 1, (stretch + 1) * num_columns // num_stretches):
                if own[column] > own[largest]:
                    largest = column
            for level in range(depth):
                token_id = np.uint32(starts[level] + np.uint32(largest))
                word = _hash_of(token_id, first_key, second_key)
                # -log(-log u) is at least log(u / (1 - u)). One logarithm in float32 costs a fraction of the exact
                # noise.
                noise = np.log(np.float32(word) / (np.float32(np.uint32(~word)) + np.float32(0.5)))
                scores[row, stretch * depth + level] = logits[row, token_id] / temperature + noise


@Kernel
def find_words(
    peaks: Floats, floors: Doubles, keys: Words, starts: Words, token_ids: Words, words: Words, counts: Indices
) -> None:  # pragma: no cover
    """Finds the tokens whose noise, below `QUIET`, may lift their column's largest logit to the floor.

    Args:
        peaks: float32 [rows, columns]: the largest logit of each column, tempered.
        floors: float64 [rows].
        keys: uint32 [rows, 2].
        starts: uint32 [depth]: token id of the first column at each level.
        token_ids: uint32 [rows, depth * columns], written from the left.
        words: uint32 [rows, depth * columns], written from the left.
        counts: int64 [rows]: how many of each row were found, written.
    """
    depth, num_columns = len(starts), peaks.shape[1]
    for row in numba.prange(len(peaks)):
        own, near = np.empty(depth, np.uint32), np.empty(num_columns, np.uint32)
        first_key, second_key, floor, count = keys[row, 0], keys[row, 1], floors[row], 0
        num_near = 0
        # No branch, because a CPU would mispredict it every other time. False for NaN.
        for column in range(num_columns):
            near[num_near] = column
            num_near += int(floor - peaks[row, column] <= QUIET)
        for number in range(num_near):
            column = near[number]
            for level in range(depth):
                own[level] = _hash_of(np.uint32(starts[level] + column), first_key, second_key)
            greatest = np.uint32(0)
            for level in range(depth):
                greatest = max(greatest, own[level])
            least = _LEAST_WORDS[int(max(floor - peaks[row, column], 0.0) * STEPS)]
            if greatest >= least:
                for level in range(depth):
                    if own[level] >= least:
                        token_ids[row, count] = starts[level] + column
                        words[row, count] = own[level]
                        count += 1
        counts[row] = count


class Contenders:
    """Finds the best perturbed scores of rows, for one vocabulary size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        depth = max(1, min(DEPTH, vocab_size // NUM_FIRST))
        self._num_columns = -(-vocab_size // depth)
        # If the vocabulary is no multiple of the depth, the last level overlaps the one before.
        starts = np.minimum(np.arange(depth) * self._num_columns, vocab_size - self._num_columns)
        self._starts = starts.astype(np.uint32)
        self._overlap = depth * self._num_columns - vocab_size
        self._loud = LoudTokens(NUM_LOUD_WORDS)
        # Kept, as it is large; most of it is never written, and takes no memory.
        self._token_ids, self._words = (np.empty((0, depth * self._num_columns), dtype=np.uint32) for _ in range(2))

    def best(self, logits: Floats, temperatures: Floats, keys: Words, k: int) -> list[Best | None]:
        """Finds the k best of `logits / temperature + noise`.

        Args:
            logits: float32 [rows, vocab].
            temperatures: float32 [rows, 1], above 0 and finite.
            keys: uint32 [rows, 2], from `outrider.core.noise.row_key`.
            k: At most the vocabulary size.

        Returns:
            For each row k token ids and their scores, the best first, equals by the lower id. None if the k-th best
            score is not finite: all tokens must be looked at then.
        """
        # The comparisons below take care of infinities.
        with np.errstate(all="ignore"):
            peaks = self._peaks(logits) / temperatures
            floors = self._floors(logits, peaks, temperatures, keys, k)
            found = [self._over_floors(peaks, floors, keys), self._loud.find(keys, self.vocab_size)]
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

    def _floors(self, logits: Floats, peaks: Floats, temperatures: Floats, keys: Words, k: int) -> Doubles:
        """Finds for each row a score that at least k tokens reach: float64 [rows], infinite if there is none."""
        num_first = min(max(NUM_FIRST, k), self._num_columns)
        scores = np.empty((len(logits), num_first * len(self._starts)), dtype=np.float32)
        score_first_columns(logits, peaks, temperatures, keys, self._starts, scores)
        # A token that is in two columns would count twice.
        rank = min(2 * k if self._overlap else k, scores.shape[1])
        floors = np.partition(scores, scores.shape[1] - rank)[:, scores.shape[1] - rank].astype(np.float64)
        absolute, relative = SLACK
        floors -= absolute + relative * np.abs(floors)
        # NaN would be overlooked anywhere in a row.
        return np.where(np.isfinite(floors) & ~np.isnan(peaks.max(1)), floors, np.inf)

    def _over_floors(self, peaks: Floats, floors: Doubles, keys: Words) -> tuple[Indices, Words, Words]:
        """Finds row, token id and word of the tokens that may reach their row's floor, without the loud ones."""
        num_rows = len(peaks)
        if num_rows > len(self._words):
            self._token_ids, self._words = (np.empty((num_rows, self._words.shape[1]), np.uint32) for _ in range(2))
        counts = np.empty(num_rows, dtype=np.int64)
        find_words(peaks, floors, keys, self._starts, self._token_ids, self._words, counts)
        most = int(counts.max())
        is_found = np.arange(most) < counts[:, None]
        token_ids, words = (each[:num_rows, :most][is_found] for each in (self._token_ids, self._words))
        return np.repeat(np.arange(num_rows), counts), token_ids, words
