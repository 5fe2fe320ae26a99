"""The Gumbel noise of `outrider.core.noise` in kernels: the hash, the noise to the bit, and a rough quick one."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.core.noise import FMIX32, LOWBIAS32

ROUGH_ERROR = 1e-4
"""The rough noise is off by less: by 2e-5 where the errors of float32 and of the quick logarithm add up."""

# Kernels may read globals of this type only.
_SHIFT_1, _FACTOR_1, _SHIFT_2, _FACTOR_2, _SHIFT_3 = (tl.constexpr(number) for number in LOWBIAS32)
_SHIFT_4, _FACTOR_3, _SHIFT_5, _FACTOR_4, _SHIFT_6 = (tl.constexpr(number) for number in FMIX32)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def hashed(token_ids: tl.tensor, first_key: tl.tensor, second_key: tl.tensor) -> tl.tensor:
    """Hash int32 token ids under the two uint32 words of a row's key: uint32, as `outrider.core.noise.hashed`."""
    words = token_ids.to(tl.uint32) ^ first_key
    words = (words ^ (words >> _SHIFT_1)) * _FACTOR_1
    words = (words ^ (words >> _SHIFT_2)) * _FACTOR_2
    words = words ^ (words >> _SHIFT_3) ^ second_key
    words = (words ^ (words >> _SHIFT_4)) * _FACTOR_3
    words = (words ^ (words >> _SHIFT_5)) * _FACTOR_4
    return words ^ (words >> _SHIFT_6)


@triton.jit
def gumbel_of_words(words: tl.tensor) -> tl.tensor:
    """Compute the noise of uint32 words in float64, rounded to float32."""
    uniform = (words.to(tl.float64) + 0.5) * _UNIT
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_gumbel_of_words(words: tl.tensor) -> tl.tensor:
    """Compute the noise of uint32 words in float32, off by less than `ROUGH_ERROR`."""
    # For the upper half of words 1 - u is used, which float32 holds as exactly as u for the lower half.
    is_upper = words >= 0x80000000
    rest = (tl.where(is_upper, words ^ 0xFFFFFFFF, words).to(tl.float32) + 0.5) * _UNIT
    # Near 1 only the absolute error of a quick logarithm is bounded. There the series is closer: its next term is 2e-7
    # of it.
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    inner = -tl.log(tl.where(is_upper, 1.0 - rest, rest))
    return -tl.log(tl.where(is_upper & (rest < 0.03125), series, inner))
