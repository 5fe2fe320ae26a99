"""An experiment: contenders that take turns on the same prompts, with the same models."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_client.bench.config import BenchConfig
from outrider_client.bench.contenders import OFF, Contender
from outrider_client.bench.prompts import Prompt

TARGET = "demo/target-100m"
DRAFT = "demo/draft"
DRAFT_UNTRAINED = "demo/draft-untrained"
_FLOAT32_DRAFTS = (DRAFT, DRAFT_UNTRAINED)
"""Small ones cost operator calls; the inflated ones are in the target's type, as their names promise a ratio."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Contenders that take turns on the same prompts. All of them are continued at every temperature."""

    name: str
    part: str
    title: str
    contenders: tuple[Contender, ...]
    temperatures: tuple[float, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int
    repeats: int
    draft: str = DRAFT
    """The speculator's model. Experiments with the same one share their services."""
    prior_share: float = 0.0
    """How much of the prior is loaded; 0 = none."""
    off_at: frozenset[int] | None = None
    """Prompts that `off` takes part in; None = all. The prompts come once, in their order, where this is set."""
    note: str = ""
    """What must be known to read the numbers."""
    target: str = TARGET
    dtype: str = "auto"
    """Number format of the target."""
    rtt_ms: float = 0.0
    """Round trip that is added between verifier and speculator."""

    @property
    def draft_dtype(self) -> str:
        """Number format of the draft model."""
        return "float32" if self.draft in _FLOAT32_DRAFTS else "auto"

    @property
    def num_generations(self) -> int:
        """Generations to run, warm-up aside."""
        if self.off_at is not None:
            return len(self.off_at) + len(self.prompts) * sum(one.method != OFF for one in self.contenders)
        return len(self.contenders) * len(self.temperatures) * len(self.prompts) * self.repeats

    def config(self, seed: int, cores: tuple[int, ...]) -> BenchConfig:
        """The benchmark that this is, for the machinery that takes turns and starts services."""
        return BenchConfig(
            target=self.target,
            draft=self.draft,
            dtype=self.dtype,
            draft_dtype=self.draft_dtype,
            methods=(OFF,),
            temperatures=self.temperatures,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            seed=seed,
            cores=cores,
            prompts=self.prompts,
        )


def label_of(contender: Contender) -> str:
    """Method and setting in a few words, as `Condition.label` has them."""
    return f"{contender.method} {contender.setting}".strip()
