"""Samples: generations as their clients saw them, with tokens and their arrival times.

Our services and the baselines have the same record, so one definition of every number serves both. Times are seconds
since the request was sent, including the prompt's prefill.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider_cli.prompts import Input

TIME_NAMES = (
    "round_ms",
    "forward_ms",
    "wait_ms",
    "overhead_ms",
    "draft_latency_ms",
    "draft_forward_ms",
    "retrieval_ms",
    "draft_retrieval_ms",
)
"""The fields of `RoundTimes`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run."""

    prompt: Input
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Effects of speculation in one generation."""

    num_rounds: int = 0
    """Forwards of the target."""
    num_drafted: int = 0
    """Chain tokens verified."""
    num_accepted: int = 0
    """Chain tokens kept."""
    num_empty: int | None = None
    """Rounds without a draft; None means not counted."""
    num_hits: int | None = None
    """Next tokens that the draft tree already had; None means that there is no such tree."""
    num_ready_hits: int | None = None
    """Hits after which more was already drafted; None means not counted."""
    num_judged: int | None = None
    """Chain tokens that were compared with the target's: the kept ones, and the first refused one of a round; None
    means not counted."""
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    """Chain tokens kept, by where they came from ("draft", "prior", "ring", ...)."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """Rounds by `auto`'s choice for them ("pearl", "best-first tree", ...)."""
    num_draft_forwards: int | None = None
    """Forwards of the draft model whose nodes have arrived; None means not counted."""
    num_draft_rows: int | None = None
    """Rows of these forwards, except those that only read the text; None means not counted."""
    num_withheld_nodes: int | None = None
    """Nodes that the drafter held back for a time to save bandwidth; None means not counted."""
    num_tail_tokens: int | None = None
    """Retrieved tokens kept after drafted ones, in the same round; None means not counted."""
    num_phrase_tokens: int | None = None
    """Retrieved tokens that forwards of the draft model have kept; None means not counted."""
    degraded: bool = False
    """True if a peer that the method needs was missing."""
    times_p50: Mapping[str, float] = field(default_factory=dict)
    """Medians over the rounds, by the names in TIME_NAMES; empty means not measured."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that arrived together."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationSample:
    """A finished generation."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Empty if the answer comes as a whole, because the times of its tokens are then unknown."""
    duration_s: float
    """Time from the request to the end of the stream."""
    rounds: Rounds

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunks[0].at_s if self.chunks else self.duration_s

    @property
    def num_decoded(self) -> int:
        """Tokens after the first chunk, whose time is the prefill's."""
        return sum(chunk.num_tokens for chunk in self.chunks[1:])

    @property
    def decode_s(self) -> float:
        """Time from the first chunk to the last."""
        return self.chunks[-1].at_s - self.chunks[0].at_s if self.chunks else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks: a round's tokens arrive together, so there is one gap a round."""
        times = [chunk.at_s for chunk in self.chunks]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Condition:
    """What a row of the results represents, except the category."""

    method: str
    setting: str
    temperature: float
    concurrency: int = 1
    rtt_ms: float = 0.0

    @property
    def label(self) -> str:
        """Method and setting in a few words."""
        return f"{self.method} {self.setting}".strip()


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation of the benchmark."""

    condition: Condition
    repeat: int
    prompt_index: int
    category: str
    generation: GenerationSample | None
    """None means that it failed."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Generations that ran at the same time, and their total time."""

    condition: Condition
    repeat: int
    duration_s: float
    samples: tuple[Sample, ...]


def generation_from_json(message: Mapping[str, Any]) -> GenerationSample:
    """Reads a generation as the worker processes report it."""
    rounds = dict(message["rounds"])
    return GenerationSample(
        num_prompt_tokens=message["num_prompt_tokens"],
        token_ids=tuple(message["token_ids"]),
        chunks=tuple(Chunk(at_s, num_tokens) for at_s, num_tokens in message["chunks"]),
        duration_s=message["duration_s"],
        rounds=Rounds(**rounds),
    )
