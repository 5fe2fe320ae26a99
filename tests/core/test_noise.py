"""The Gumbel noise: fixed bits, and no structure that a draw could see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.core.noise import (
    LoudTokens,
    acceptance_uniform,
    gumbel,
    gumbel_of,
    gumbel_of_words,
    gumbel_rows,
    hash_rows,
    row_key,
    row_keys,
)


def test_the_bits_never_change() -> None:
    """Other processes, and texts made earlier with a seed, depend on these values."""
    assert hash_rows(0, [0], np.arange(4))[0].tolist() == [1732568692, 3297423137, 2394447613, 3652510277]
    assert hash_rows(2**64 - 1, [12_345], np.array([151_935]))[0].tolist() == [3581786768]


def test_two_tokens_of_a_row_never_share_a_hash() -> None:
    assert len(np.unique(hash_rows(7, [3], np.arange(200_000))[0])) == 200_000


def test_rows_differ_by_seed_and_by_output_index() -> None:
    keys = {row_key(seed, index) for seed in range(100) for index in range(100)}
    assert len(keys) == 10_000


def test_a_row_is_the_same_alone_and_in_a_block() -> None:
    tokens = np.arange(1000)
    assert (hash_rows(5, range(8), tokens)[3] == hash_rows(5, [3], tokens)[0]).all()
    assert (gumbel_rows(5, range(8), tokens)[3] == gumbel(5, 3, tokens)).all()


def test_keys_of_many_rows_are_those_of_each() -> None:
    seeds, indices = [0, 2**64 - 1, 7, 7], [0, 2**31, 5, 6]
    found = row_keys(seeds, indices).tolist()
    assert [tuple(key) for key in found] == [row_key(*each) for each in zip(seeds, indices, strict=True)]


def test_a_token_has_the_same_noise_whatever_tokens_are_asked_for() -> None:
    assert gumbel(9, 1, np.array([500, 3])).tolist() == gumbel(9, 1, np.arange(501))[[500, 3]].tolist()


@pytest.mark.parametrize("bits", [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)])
def test_every_byte_of_the_hash_is_uniform(bits: slice) -> None:
    words = hash_rows(1, range(200), np.arange(2048)).ravel()
    counts = np.bincount((words >> np.uint32(bits.start)) & np.uint32(255), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize(
    ("along_rows", "along_tokens", "along_seeds"),
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)],
    ids=["output index", "token", "seed", "output index and token"],
)
def test_neighbours_are_independent(along_rows: int, along_tokens: int, along_seeds: int) -> None:
    """Joint counts of the top 5 bits, and of the low 5 bits, of two neighbouring values."""
    tokens = np.arange(1024)
    words = np.stack([hash_rows(seed, range(65), tokens) for seed in range(9)])
    here = words[: 9 - along_seeds, : 65 - along_rows, : 1024 - along_tokens]
    there = words[along_seeds:, along_rows:, along_tokens:]
    for part in (lambda w: w >> np.uint32(27), lambda w: w & np.uint32(31)):
        joint = np.bincount((part(here) * np.uint32(32) + part(there)).ravel(), minlength=1024)
        assert stats.chisquare(joint).pvalue > 1e-4


def test_the_noise_is_gumbel() -> None:
    sample = gumbel_rows(3, range(50), np.arange(2048)).ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    assert np.isfinite(sample).all()


def test_the_noise_is_that_of_the_middle_of_a_hash_bucket() -> None:
    """So it is finite at both ends. The difference is visible where the hash is small."""
    words = hash_rows(3, [0], np.arange(500_000))[0]
    token = int(words.argmin())
    uniform = (int(words[token]) + 0.5) / 2**32
    assert gumbel(3, 0, np.array([token]))[0] == np.float32(-np.log(-np.log(uniform)))
    ends = (np.array([0, 2**32 - 1], dtype=np.float64) + 0.5) * 2.0**-32
    assert np.isfinite((-np.log(-np.log(ends))).astype(np.float32)).all()


def test_the_noise_lies_within_its_bounds_and_rises_with_the_hash() -> None:
    top, num_words = 2**32 - 1, 2**18
    spread = np.linspace(0, top, num_words).astype(np.uint32)
    # Neighbours too, at both ends and where the noise is close to 0, where rounding matters most.
    ranges = [
        np.arange(start, start + num_words) for start in (0, int(2**32 / np.e) - num_words // 2, 2**32 - num_words)
    ]
    for words in (spread, *(each.astype(np.uint32) for each in ranges)):
        assert (np.diff(gumbel_of_words(words)) >= 0).all()
    lowest, highest = gumbel_of_words(np.array([0, top], dtype=np.uint32)).tolist()
    assert lowest == pytest.approx(-np.log(33 * np.log(2)), rel=1e-6)
    assert highest == pytest.approx(33 * np.log(2), rel=1e-6)
    assert -3.14 < lowest < highest < 22.9


@pytest.mark.parametrize("vocab_size", [1, 30_000, 200_000])
def test_loud_tokens_are_those_of_the_highest_hashes(vocab_size: int) -> None:
    num_words = 2**21
    keys = np.array([row_key(seed, index) for seed, index in ((1, 0), (1, 7), (2**64 - 1, 4095))], dtype=np.uint32)
    rows, token_ids, words = LoudTokens(num_words).find(keys, vocab_size)
    hashes = np.concatenate([hash_rows(s, [i], np.arange(vocab_size)) for s, i in ((1, 0), (1, 7), (2**64 - 1, 4095))])
    found = set(zip(rows.tolist(), token_ids.tolist(), words.tolist(), strict=True))
    expected = np.nonzero(hashes >= 2**32 - num_words)
    assert found == set(zip(*(each.tolist() for each in (*expected, hashes[expected])), strict=True))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_the_noise_of_a_few_tokens_is_that_of_the_rows(seed: int, index: int, token_ids: list[int]) -> None:
    expected = gumbel(seed, index, np.array(token_ids))
    assert gumbel_of(seed, index, token_ids) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_uniforms_of_the_ratio_rule_never_change() -> None:
    assert [acceptance_uniform(7, index) for index in range(2)] == [0.3436144063130021, 0.4417928786095805]
    assert 0 <= acceptance_uniform(2**64 - 1, 2**20) < 1


def test_the_uniforms_of_the_ratio_rule_are_uniform_and_independent_of_the_noise() -> None:
    uniforms = np.array([acceptance_uniform(seed, index) for seed in range(200) for index in range(200)])
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-3
    noise = np.concatenate([gumbel_rows(seed, range(200), np.arange(1))[:, 0] for seed in range(200)])
    neighbours = (np.roll(uniforms, 1), np.roll(uniforms, 200), stats.gumbel_r.cdf(noise))
    for other in neighbours:
        joint = np.histogram2d(uniforms, other, bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(joint.ravel()).pvalue > 1e-4
