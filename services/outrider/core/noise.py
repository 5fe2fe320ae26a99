"""The Gumbel noise of every draw: a pure function of (seed, output index, token id).

Adding Gumbel noise to log-probabilities and taking the best token draws exactly from the distribution. Keying
the noise by position makes the draw repeatable, and lets a draft model that knows the seed guess the *draw*,
not only the likely token. So the bits must be the same in every process, on every device, in numpy and torch:
the hash uses only 32-bit multiplications, shifts and xors (`outrider.models.torch.noise` is the torch twin).

The hash of a token is two rounds of a 32-bit finaliser, with one half of the row's 64-bit key injected before each:
lowbias32 (Wellons 2018, the least biased of its form that a search found) and murmur3's fmix32. Both rounds are
bijections of 32-bit words, so two tokens of a row never share a value. The second key separates rows with equal first
words. Joint counts of neighbouring tokens, output indices and seeds are tested for uniformity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

MASK_64 = 2**64 - 1
MASK_32 = 2**32 - 1
#: 2**64 / golden ratio: the increment of splitmix64 (Steele, Lea, Flood 2014).
GOLDEN_64 = 0x9E3779B97F4A7C15

#: Stands for an output index in the key of the uniforms of the ratio rule.
ACCEPTANCE = 2**63

#: (shift, factor, shift, factor, shift) of the two rounds.
LOWBIAS32 = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
FMIX32 = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)


def _mix_64(word: int) -> int:
    """Applies the output function of splitmix64, a bijection of 64-bit words."""
    word = (word + GOLDEN_64) & MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)


def row_key(seed: int, output_index: int) -> tuple[int, int]:
    """Returns two 32-bit words that select the noise of one output index. Under one seed, all indices have different
    keys."""
    key = _mix_64(_mix_64(seed) ^ output_index)
    return key >> 32, key & 0xFFFFFFFF


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Returns the `row_key` of many rows at once: uint32 [rows, 2]."""
    mixed = {seed: _mix_64(seed) for seed in set(seeds)}
    words = np.array([mixed[seed] ^ index for seed, index in zip(seeds, output_indices, strict=True)], dtype=np.uint64)
    # As `_mix_64`: words of 64 bits wrap around by themselves.
    words += _INCREMENT_64
    for shift, factor in zip(_SHIFTS_64, _FACTORS_64, strict=False):
        words ^= words >> shift
        words *= factor
    words ^= words >> _SHIFTS_64[2]
    return np.stack((words >> _HALF_64, words), 1).astype(np.uint32)


def acceptance_uniform(seed: int, output_index: int) -> float:
    """Returns the uniform in [0, 1) that decides under the ratio rule if a drafted token is kept; one for each index.

    Independent of the Gumbel noise: its key is that of an output index that no text reaches.
    """
    key = _mix_64(_mix_64(seed) ^ ACCEPTANCE)
    # The upper 53 bits, as many as a double holds: every value is exact, and none is rounded up to 1.
    return (_mix_64(key ^ output_index) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of one of several texts; the first one has the request's seed."""
    if not index:
        return seed
    key, salt = seed.to_bytes(8, "little"), index.to_bytes(4, "little")
    return int.from_bytes(blake2b(key, digest_size=8, person=b"outrider choice", salt=salt).digest(), "little")


# Arrays, because numpy would make one of a plain number at every call. Odd numbers have an inverse modulo 2**32.
_FACTORS = np.array([LOWBIAS32[1], LOWBIAS32[3], FMIX32[1], FMIX32[3]], dtype=np.uint32)
_INVERSE_FACTORS = np.array([pow(factor, -1, 2**32) for factor in _FACTORS.tolist()], dtype=np.uint32)
_SHIFT_13, _SHIFT_15, _SHIFT_16, _SHIFT_30 = (np.array(shift, dtype=np.uint32) for shift in (13, 15, 16, 30))
_INCREMENT_64, _HALF_64 = np.array(GOLDEN_64, dtype=np.uint64), np.array(32, dtype=np.uint64)
_SHIFTS_64 = np.array([30, 27, 31], dtype=np.uint64)
_FACTORS_64 = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def hash_rows(seed: int, output_indices: Sequence[int], token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Returns a 32-bit word for each output index and each token id.

    Returns:
        uint32 [num output indices, num token ids].
    """
    keys = np.array([row_key(seed, index) for index in output_indices], dtype=np.uint32)
    return hashed(token_ids.astype(np.uint32)[None, :], keys[:, :1], keys[:, 1:])


def hashed(
    token_ids: npt.NDArray[np.uint32], first_keys: npt.NDArray[np.uint32], second_keys: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Returns the 32-bit word of each token id under its two words of `row_key`.

    The first and second keys have one shape, and the result, uint32, that of ids and keys broadcast.
    """
    words = token_ids ^ first_keys
    spare = np.empty_like(words)
    _xor_shift(words, _SHIFT_16, spare)
    words *= _FACTORS[0]
    _xor_shift(words, _SHIFT_15, spare)
    words *= _FACTORS[1]
    words ^= _between_rounds(second_keys)
    words *= _FACTORS[2]
    _xor_shift(words, _SHIFT_13, spare)
    words *= _FACTORS[3]
    _xor_shift(words, _SHIFT_16, spare)
    return words


def _xor_shift(words: npt.NDArray[np.uint32], shift: npt.NDArray[np.uint32], spare: npt.NDArray[np.uint32]) -> None:
    """Computes `words ^= words >> shift` in place, with an array of the same shape to write to."""
    np.right_shift(words, shift, out=spare)
    words ^= spare


def _between_rounds(second_keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Returns what the words are xored with between the last factor of the first round and the first of the second.

    There each word is xored with its upper half, with the key, and with its upper half again. That is linear, and
    xoring with the upper half twice cancels out: only the key and the key's upper half are left.
    """
    return second_keys ^ (second_keys >> _SHIFT_16)


class LoudTokens:
    """Finds the tokens of a row that have the highest hashes of all, and so the highest noise.

    The hash is a bijection of 32-bit words, so the highest words are mapped back to their ids: no other token is
    hashed.
    """

    def __init__(self, num_words: int) -> None:
        """Prepares for the `num_words` highest words: 2**32 - num_words and above."""
        self._words = np.arange(2**32 - num_words, 2**32, dtype=np.uint32)
        # Back to the second key, the inverse is the same in all rows.
        halfway = self._words ^ (self._words >> _SHIFT_16)
        halfway *= _INVERSE_FACTORS[3]
        # Each bit was changed by the bit 13 above it, which was itself changed by the bit 13 above that one.
        halfway ^= (halfway >> _SHIFT_13) ^ (halfway >> np.uint32(26))
        halfway *= _INVERSE_FACTORS[2]
        self._halfway = halfway

    def find(
        self, keys: npt.NDArray[np.uint32], vocab_size: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Finds them in several rows with `row_key`s uint32 [rows, 2]. Returns row, token id and word of each."""
        token_ids = self._halfway ^ _between_rounds(keys[:, 1:])
        spare = np.empty_like(token_ids)
        token_ids *= _INVERSE_FACTORS[1]
        np.right_shift(token_ids, _SHIFT_30, out=spare)
        # As with 13 above: the bits that were changed twice.
        spare ^= token_ids >> _SHIFT_15
        token_ids ^= spare
        token_ids *= _INVERSE_FACTORS[0]
        _xor_shift(token_ids, _SHIFT_16, spare)
        token_ids ^= keys[:, :1]
        # Of flat arrays: `nonzero` of two dimensions takes ten times as long.
        found = np.flatnonzero(token_ids < vocab_size)
        rows, places = np.divmod(found, len(self._words))
        return rows, token_ids.ravel()[found], self._words[places]


def gumbel_rows(seed: int, output_indices: Sequence[int], token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns standard Gumbel noise for each output index and each token id: float32 [num output indices, num token
    ids]."""
    return gumbel_of_words(hash_rows(seed, output_indices, token_ids))


def gumbel_of_words(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Returns the noise that a hash stands for: float32, of the shape of `words`. It rises with the word.

    Computed in float64: in float32 the largest hashes would all round to a uniform of 1, and to infinite noise.
    The noise lies between -3.14 and 22.9.
    """
    uniform = words.astype(np.float64)
    uniform += 0.5  # neither 0 nor 1: both logarithms stay finite
    uniform *= 2.0**-32
    # -log(-log(u)), without another array of a whole vocabulary for each step.
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform.astype(np.float32)


def gumbel(seed: int, output_index: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns standard Gumbel noise for each token id at one output index: float32, of the shape of `token_ids`."""
    noise: npt.NDArray[np.float32] = gumbel_rows(seed, (output_index,), token_ids)[0]
    return noise


def gumbel_of(seed: int, output_index: int, token_ids: Sequence[int]) -> list[float]:
    """Returns the same as `gumbel`, in double precision, without arrays: quicker for a handful of tokens."""
    first, second = row_key(seed, output_index)
    noise = []
    for token_id in token_ids:
        word = _finalised(_finalised((token_id ^ first) & MASK_32, LOWBIAS32) ^ second, FMIX32)
        noise.append(-math.log(-math.log((word + 0.5) * 2.0**-32)))
    return noise


def _finalised(word: int, constants: tuple[int, int, int, int, int]) -> int:
    """Applies `_finalise` to one word."""
    first, factor, second, factor_2, third = constants
    word ^= word >> first
    word = (word * factor) & MASK_32
    word ^= word >> second
    word = (word * factor_2) & MASK_32
    return word ^ (word >> third)
