"""Noise computed by kernels has numpy's bits, and its quick version is never far off."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.core.noise import gumbel_of_words, hash_rows, row_key

pytest.importorskip("triton")

import triton
import triton.language as tl

from outrider.models.cuda import noise

CHUNK = 2**24
MAX_DIFFERENT = 2000
"""How many of 2**32 words may have a noise that is off by one float32 step. One of 2**29 lies so close to the middle
of two numbers that an error in the last place of float64 decides; around a noise of 0 a few more do."""


@triton.jit
def fill_hashes(out: tl.tensor, first_key: tl.tensor, second_key: tl.tensor, SIZE: tl.constexpr) -> None:
    token_ids = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    keys = tl.load(first_key).to(tl.uint32, bitcast=True), tl.load(second_key).to(tl.uint32, bitcast=True)
    tl.store(out + token_ids, noise.hashed(token_ids, keys[0], keys[1]).to(tl.int32, bitcast=True))


@triton.jit
def fill_noise(words: tl.tensor, exact: tl.tensor, rough: tl.tensor, SIZE: tl.constexpr) -> None:
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own = tl.load(words + places).to(tl.uint32, bitcast=True)
    tl.store(exact + places, noise.gumbel_of_words(own))
    tl.store(rough + places, noise.rough_gumbel_of_words(own))


def noise_of(words: npt.NDArray[np.uint32], device: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The exact and the rough noise of words, as many as a power of two."""
    size = min(1024, len(words))
    given = torch.from_numpy(words.view(np.int32)).to(device)
    exact, rough = (torch.empty(len(words), device=device) for _ in range(2))
    fill_noise[len(words) // size,](given, exact, rough, SIZE=size)
    return exact.cpu().numpy(), rough.cpu().numpy()


@pytest.mark.interpret
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_kernels_and_numpy_hash_to_the_same_bits(seed: int) -> None:
    keys = torch.from_numpy(np.array(row_key(seed, 77), dtype=np.uint32).view(np.int32))
    out = torch.empty(8192, dtype=torch.int32)
    fill_hashes[2,](out, keys[:1], keys[1:], SIZE=4096)
    assert (out.numpy().view(np.uint32) == hash_rows(seed, [77], np.arange(8192))[0]).all()


@pytest.mark.interpret
def test_exact_noise_is_numpys_and_rough_noise_is_close_at_both_ends_and_between() -> None:
    ends = [np.arange(1024), 2**31 - 512 + np.arange(1024), 2**32 - 1024 + np.arange(1024)]
    # Around 31/32, where the rough noise switches to a series.
    ends.append(2**32 - 2**27 - 512 + np.arange(1024))
    between = np.random.default_rng(0).integers(0, 2**32, 4096)
    words = np.concatenate([*ends, between]).astype(np.uint32)
    exact, rough = noise_of(words, "cpu")
    assert (exact == gumbel_of_words(words)).all()
    assert np.abs(rough - exact).max() < noise.ROUGH_ERROR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA")
@pytest.mark.timeout(600)
def test_the_noise_of_all_words_is_numpys_but_for_few_and_never_far() -> None:
    def differing(start: int) -> list[int]:
        words = np.arange(start, start + CHUNK, dtype=np.uint32)
        exact, rough = noise_of(words, "cuda")
        expected = gumbel_of_words(words)
        assert np.abs(rough - expected).max() < noise.ROUGH_ERROR
        at = np.flatnonzero(exact != expected)
        neighbours = np.nextafter(expected[at], np.inf), np.nextafter(expected[at], -np.inf)
        assert ((exact[at] == neighbours[0]) | (exact[at] == neighbours[1])).all()
        found: list[int] = words[at].tolist()
        return found

    # Numpy computes in all threads at once: one thread would take minutes.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        different = [word for some in threads.map(differing, range(0, 2**32, CHUNK)) for word in some]
    print(f"{len(different)} words: {different[:50]}")
    assert len(different) <= MAX_DIFFERENT
