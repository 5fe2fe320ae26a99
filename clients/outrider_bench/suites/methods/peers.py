"""A peer: what another program wins over plain decoding, on another machine, with the same weights.

llama.cpp (the sources in llama-cpp-python 0.3.36, built there) ran the same pair as GGUF, 8 code prompts of 128
tokens, one core a model, its best setting at each temperature; the plain runner beside it took 9.8 ms a token. The
ratio to that is what another machine can be compared with, not the tokens a second.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "llama.cpp as measured for this project on another machine (November 2026): the same weights as GGUF, 8 code "
    "prompts of 128 tokens, its best of several draft lengths, thresholds and plain decoding. Ratios are to a plain "
    "runner of the same weights beside it, 9.8 ms a token. What can be compared is the ratio, not the tokens a second."
)
PLAIN_TOKENS_PER_S = 102.0


@dataclass(frozen=True, slots=True)
class Peer:
    """llama.cpp's best at a temperature."""

    temperature: float
    tokens_per_s: float
    asked: float
    """How many times its ratio ours should be."""

    @property
    def speedup(self) -> float:
        """Over the plain runner."""
        return self.tokens_per_s / PLAIN_TOKENS_PER_S


LLAMA_CPP = (Peer(0.0, 355.0, 1.0), Peer(0.7, 204.0, 1.1), Peer(1.0, 145.0, 1.3))
