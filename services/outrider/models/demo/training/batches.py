"""Batches of training windows: from the text, and for the draft model also from the target.

The draft will be asked to continue what the *target* wrote, so in the later
part of its training every other batch is text sampled from the target. That
pool is sampled once, when it is first needed, from prompts out of the corpus.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache

#: From this share of the time on, sequences are 512 instead of 256 tokens long ...
SHORT_SEQUENCES_END = 0.4
#: ... and from this one on, those of every other batch are 1024 tokens long. These are the draft's only batches of
#: text: its others are sampled from the target.
LONG_SEQUENCES_START = 0.8

#: When the draft starts to see sampled text, and the share of its time that sampling takes.
SAMPLES_START = 0.4
SAMPLING_SHARE = 0.1
SAMPLE_LENGTH = 256
SAMPLE_PROMPT = 64
SAMPLES_AT_ONCE = 32
SAMPLE_TEMPERATURES = (1.0, 0.7)

#: Maps (step, share of the time that has passed) to windows of token ids.
Draw = Callable[[int, float], Tensor]
TokenStream = npt.NDArray[np.int64]


def text_batches(stream: TokenStream, seed: int) -> Draw:
    """Random windows of the text, 2048 tokens a batch: short ones first, which are faster."""
    generator = np.random.default_rng(seed)

    def draw(step: int, share: float) -> Tensor:
        if share < SHORT_SEQUENCES_END:
            return draw_windows(stream, generator, 8, 256)
        if share >= LONG_SEQUENCES_START and step % 2:
            return draw_windows(stream, generator, 2, 1024)
        return draw_windows(stream, generator, 4, 512)

    return draw


def mixed_batches(stream: TokenStream, target: LlamaForCausalLM, minutes: float, seed: int) -> Draw:
    """Text as in :func:`text_batches`; later, every other batch was sampled from ``target``."""
    draw_text = text_batches(stream, seed)
    generator = np.random.default_rng(seed + 1)
    pool: Tensor | None = None

    def draw(step: int, share: float) -> Tensor:
        nonlocal pool
        if share < SAMPLES_START or step % 2:
            return draw_text(step, share)
        if pool is None:
            pool = _sample_pool(stream, target, 60 * minutes * SAMPLING_SHARE, seed)
        return pool[torch.from_numpy(generator.integers(0, len(pool), size=8))]

    return draw


def draw_windows(stream: TokenStream, generator: np.random.Generator, count: int, length: int) -> Tensor:
    """Random windows of ``length`` tokens and the one that follows them."""
    # The upper bound is exclusive: the last window there is ends with the last token.
    starts = generator.integers(0, len(stream) - length, size=count)
    return torch.from_numpy(np.stack([stream[start : start + length + 1] for start in starts]))


def _sample_pool(stream: TokenStream, target: LlamaForCausalLM, seconds: float, seed: int) -> Tensor:
    """Sample for about ``seconds``, at each temperature in turn."""
    starts = np.random.default_rng(seed + 2)
    generator = torch.Generator().manual_seed(seed)
    begun = time.perf_counter()
    rows: list[Tensor] = []
    while not rows or time.perf_counter() - begun < seconds:
        # `draw_windows` adds one token: SAMPLE_PROMPT of them here, and SAMPLE_LENGTH + 1 with the continuation.
        prompts = draw_windows(stream, starts, SAMPLES_AT_ONCE, SAMPLE_PROMPT - 1)
        temperature = SAMPLE_TEMPERATURES[len(rows) % len(SAMPLE_TEMPERATURES)]
        missing = SAMPLE_LENGTH + 1 - SAMPLE_PROMPT
        rows.append(sample_continuations(target, prompts, missing, temperature, generator))
    pool = torch.cat(rows)
    print(f"sampled {len(pool)} sequences of {SAMPLE_LENGTH} tokens", flush=True)
    return pool


@torch.no_grad()
def sample_continuations(
    model: LlamaForCausalLM,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """``prompts`` (rows of equal length) with ``new_tokens`` more; greedy at temperature 0."""
    # A cache that grows is copied at every step, which costs more than the model.
    cache = StaticCache(config=model.config, max_cache_len=prompts.shape[1] + new_tokens)
    pieces = [prompts]
    for _ in range(new_tokens):
        # First the prompts, then one token each: the cache has the rest.
        logits = model(input_ids=pieces[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        if temperature == 0:
            pieces.append(logits.argmax(-1, keepdim=True))
        else:
            probabilities = (logits.float() / temperature).softmax(-1)
            pieces.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(pieces, dim=1)
