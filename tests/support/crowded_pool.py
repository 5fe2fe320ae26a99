"""A target whose pool of keys and values is too small for several sessions, and prompts for them."""

from __future__ import annotations

from functools import cache

from outrider.models.loading import LoadedModel, load_model

NUM_TOKENS = 640
"""Tokens that the pool has room for: ten blocks."""
PROMPTS = [f"def f{n}(x):\n    # {'step ' * (5 * n)}\n    return" for n in range(10)]


@cache
def crowded_model() -> LoadedModel:
    """The demo target with that pool."""
    return load_model("demo/target", exact="auto", num_tokens=NUM_TOKENS)
