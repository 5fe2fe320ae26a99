"""The best perturbed scores, computed from a few tokens' noise, have the same bits as from the noise of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.core.noise import gumbel, gumbel_of_words, hash_rows, hashed, row_key
from outrider.core.params import SamplingParams
from outrider.models import largest
from outrider.models.cpu import draws
from outrider.models.cpu.contenders import NUM_LOUD_WORDS, QUIET, STEPS, Contenders, find_words
from outrider.models.filters import tempered_and_filtered
from outrider.models.sampling import Sampler
from outrider.models.torch.draws import TorchDraws

Floats = npt.NDArray[np.float32]

TEMPERATURES = [1e-30, 1e-9, 0.01, 0.3, 0.7, 1.0, 1.8, 100.0, 1e38]
KINDS = ["peaky", "flat", "wide", "equal", "ties", "holes", "few", "large"]


def row_of(kind: str, vocab_size: int, rng: np.random.Generator) -> Floats:
    """Logits of one row, of shapes that models give and of shapes that they should not."""
    row = rng.normal(0, 1, vocab_size)
    few = rng.choice(vocab_size, min(vocab_size, 40), replace=False)
    if kind == "peaky":
        row[few] += rng.uniform(4, 18, len(few))
    elif kind == "flat":
        row *= 0.01
    elif kind == "wide":
        row *= 5
    elif kind == "equal":
        row[:] = rng.choice([0.0, -3.0, 1e6])
    elif kind == "ties":
        row = row.round() * 2
    elif kind == "holes":
        row[1:][rng.random(vocab_size - 1) < 0.7] = -np.inf
    elif kind == "few":
        row[np.setdiff1d(np.arange(vocab_size), few[:9])] = -np.inf
    elif kind == "large":
        row = row * 100 + 1e6
    return row.astype(np.float32)


def best_of_all(logits: Floats, temperature: float, seed: int, index: int, k: int) -> tuple[list[int], list[float]]:
    """The definition: the noise of every token, and a stable sort."""
    scores = logits / np.float32(temperature) + gumbel(seed, index, np.arange(len(logits)))
    order = np.argsort(-scores, kind="stable")[:k]
    return order.tolist(), scores[order].tolist()


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab_size=st.sampled_from([8, 31, 32, 63, 64, 65, 1000, 1024, 4099, 20_011]),
    rows=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(TEMPERATURES)), min_size=1, max_size=4),
    k=st.sampled_from([1, 2, 8, 70]),
)
@example(seed=1, vocab_size=151_936, rows=[("peaky", 0.7), ("peaky", 1.0), ("flat", 0.7), ("wide", 1.0)], k=1)
@example(seed=2, vocab_size=151_936, rows=[("peaky", 0.7), ("peaky", 1.0), ("flat", 0.7), ("wide", 1.0)], k=8)
@example(seed=3, vocab_size=50_257, rows=[("ties", 1.0), ("equal", 1.0), ("holes", 1.8), ("large", 0.7)], k=8)
def test_the_best_scores_are_those_of_the_whole_row_bit_by_bit(
    seed: int, vocab_size: int, rows: list[tuple[str, float]], k: int
) -> None:
    k = min(k, vocab_size)
    rng = np.random.default_rng(seed)
    logits = np.stack([row_of(kind, vocab_size, rng) for kind, _ in rows])
    temperatures = np.array([[temperature] for _, temperature in rows], dtype=np.float32)
    keys = np.array([row_key(seed, index) for index in range(len(rows))], dtype=np.uint32)
    found = Contenders(vocab_size).best(logits, temperatures, keys, k)
    for index, ((_, temperature), of_row) in enumerate(zip(rows, found, strict=True)):
        if of_row is None:
            assert np.isfinite(logits[index]).sum() < 2 * k, "there is a floor for every row with enough tokens"
        else:
            with np.errstate(over="ignore"):
                assert of_row == best_of_all(logits[index], temperature, seed, index, k)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("k", [1, 8])
def test_a_row_with_what_is_no_number_leaves_the_others_as_they_are(bad: float, k: int) -> None:
    logits = row_of("peaky", 50_000, np.random.default_rng(0))[None].repeat(3, 0)
    logits[1, 1234] = bad
    keys = np.array([row_key(5, 0)] * 3, dtype=np.uint32)
    before, itself, after = Contenders(50_000).best(logits, np.ones((3, 1), dtype=np.float32), keys, k)
    assert itself is None or bad == np.inf  # every token must be looked at
    assert before == after == best_of_all(logits[0], 1.0, 5, 0, k)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_not_a_number_still_has_a_draw(filters: dict[str, Any]) -> None:
    logits = torch.zeros(2, 151_936)
    logits[0, 99], logits[1] = torch.nan, torch.nan
    for token in Sampler().draw(logits, [SamplingParams(seed=5, **filters)] * 2, [0, 0]):
        assert 0 <= token < 151_936


def test_a_token_far_below_the_others_wins_by_the_loudest_noise() -> None:
    vocab_size, rival = 151_936, 77
    words = hash_rows(3, range(60), np.arange(vocab_size))
    index, loud = (int(each) for each in np.unravel_index(words.argmax(), words.shape))
    noise = gumbel(3, index, np.array([loud, rival]))
    assert noise[0] > QUIET + 1
    logits = np.full((1, vocab_size), -1000, dtype=np.float32)
    logits[0, rival] = 20
    keys = np.array([row_key(3, index)], dtype=np.uint32)
    finder, temperatures = Contenders(vocab_size), np.ones((1, 1), dtype=np.float32)
    for margin, winner in ((0.001, loud), (-0.001, rival)):
        logits[0, loud] = 20 + noise[1] - noise[0] + margin
        (best,) = finder.best(logits, temperatures, keys, 1)
        assert best == best_of_all(logits[0], 1.0, 3, index, 1)
        assert best is not None
        assert best[0] == [winner]


def test_quiet_noise_and_the_simpler_bounds_enclose_the_noise() -> None:
    """These decide which tokens are looked at. In between, all rise with the hash (`tests/core/test_noise.py`)."""
    edge = 2**32 - NUM_LOUD_WORDS
    assert gumbel_of_words(np.array([edge - 1], dtype=np.uint32))[0] <= QUIET
    words = np.concatenate([np.arange(5000), np.linspace(5000, edge, 100_000), np.arange(edge, 2**32)]).astype(
        np.uint32
    )
    noise = gumbel_of_words(words).astype(np.float64)
    uniform = (words + 0.5) * 2.0**-32
    complement = (2.0**32 - words - 0.5) * 2.0**-32
    assert (noise >= np.log(uniform / complement) - 1e-5).all()
    assert (noise <= -np.log(complement) + 1e-5).all()


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 10**6},
]
PARAMS = st.builds(
    lambda seed, temperature, filters: SamplingParams(seed=seed, temperature=temperature, **filters),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 5e-324, 0.3, 0.7, 1.0, 1.8, 100.0, 1.7e308]),
    st.sampled_from(FILTERS),
)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([8, 999, 3000]),
    rows=st.lists(st.tuples(st.sampled_from(KINDS), PARAMS), min_size=1, max_size=4),
)
@example(
    seed=1,
    vocab_size=50_257,
    rows=[("wide", SamplingParams(seed=8, temperature=1.8, **filters)) for filters in FILTERS],
)
@example(seed=2, vocab_size=50_257, rows=[("ties", SamplingParams(seed=8, **filters)) for filters in FILTERS])
def test_draws_and_candidates_are_those_of_all_noise_whatever_the_filters(
    seed: int, vocab_size: int, rows: list[tuple[str, SamplingParams]]
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(np.stack([row_of(kind, vocab_size, rng) for kind, _ in rows]))
    params = [p for _, p in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "LARGE_VOCAB_SIZE", 10**9)
        drawn = Sampler(TorchDraws()).draw(logits, params, range(len(rows)))
        ranked = Sampler(TorchDraws()).candidates(logits, params, range(len(rows)), 8)
        tempered = tempered_and_filtered(logits, params)
        patch.setattr(largest, "LARGE_VOCAB_SIZE", 1)
        patch.setattr(draws, "LARGE_VOCAB_SIZE", 1)
        patch.setattr(draws, "MANY_TOKENS", 100)
        assert Sampler().draw(logits, params, range(len(rows))) == drawn
        lazily = Sampler().candidates(logits, params, range(len(rows)), 8)
        assert torch.equal(tempered_and_filtered(logits, params), tempered)
    for kind_and_params, one, other in zip(rows, lazily, ranked, strict=True):
        assert [c.logprob for c in one] == [c.logprob for c in other]
        # `topk` does not define which of several equals are among the eight.
        if kind_and_params[0] in ("peaky", "wide") and kind_and_params[1].temperature in (0.3, 0.7, 1.0):
            assert one == other


def test_words_are_found_that_lift_their_column_to_the_floor_and_no_much_lower_ones() -> None:
    starts, floors = np.array([0, 700, 151_000], np.uint32), np.array([5.0, np.inf, 0.0])
    keys = np.array([row_key(seed, 5) for seed in (1, 1, 2**63)], np.uint32)
    peaks = np.random.default_rng(0).uniform(-20, 6, (3, 700)).astype(np.float32)
    peaks[0, 3] = np.nan
    token_ids, words = (np.empty((3, 2100), np.uint32) for _ in range(2))
    counts = np.empty(3, np.int64)
    find_words(peaks, floors, keys, starts, token_ids, words, counts)
    assert counts[1] == 0
    for row in (0, 2):
        ids = starts + np.arange(700, dtype=np.uint32)[:, None]
        hashes = hashed(ids, keys[row, 0], keys[row, 1])
        found = dict(zip(token_ids[row, : counts[row]].tolist(), words[row, : counts[row]].tolist(), strict=True))
        assert found.items() <= dict(zip(ids.ravel().tolist(), hashes.ravel().tolist(), strict=True)).items()
        heights = peaks[row, :, None] + gumbel_of_words(hashes).astype(np.float64)
        is_quiet = hashes < 2**32 - NUM_LOUD_WORDS
        assert set(ids[is_quiet & (heights >= floors[row])].tolist()) <= found.keys()
        # One step of the table, and the excess of -log(1 - u) over the noise, which is at most that of the word 0.
        bounds = peaks[row, :, None] - np.log1p(-(hashes + 0.5) * 2.0**-32)
        assert not found.keys() & set(ids[bounds < floors[row] - 1.01 / STEPS].tolist())
