"""What is measured: experiments, and how much of everything: once in full, and once in two minutes, to see it work."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_client.bench.config import BenchConfig, MethodsConfig
from outrider_client.bench.contenders import OFF, Contender
from outrider_client.bench.prompts import Prompt

TARGET = "demo/target-100m"
DRAFT = "demo/draft"
DRAFT_C5, DRAFT_C2_5 = "demo/draft-c5", "demo/draft-c2.5"
DRAFT_UNTRAINED = "demo/draft-untrained"
DRAFT_SLOW = "demo/draft-c2.2"
"""A forward takes about twenty times as long as one of DRAFT."""
_FLOAT32_DRAFTS = (DRAFT, DRAFT_UNTRAINED)
"""Small ones cost operator calls; the inflated ones are in the target's type, as their names promise a ratio."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    method_prompts: int = 3
    """Of the table of methods."""
    max_tokens: int = 104
    """Of it, and of the sweep of card's beam: greedy chains are long."""
    num_prompts: int = 2
    """Of each of the other experiments, or of each of its categories."""
    ablation_tokens: int = 48
    double_tokens: int = 64
    """Of double: what it finds depends on how far the text has come."""
    auto_tokens: int = 40
    """Of auto, away from the table of methods."""
    beam_widths: tuple[int, ...] = (5, 16, 50, 100, 200)
    biases: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0)
    max_rows: tuple[int, ...] = (4, 8, 16, 24, 32)
    prior_prompts: int = 80
    prior_tokens: int = 64
    """Of each continuation of them."""
    prior_shares: tuple[float, ...] = (1 / 16, 1 / 4)
    """Beside the whole."""
    replay_requests: int = 300
    replay_tokens: int = 20
    replay_cold: int = 20
    """Requests at the beginning that count as a cold start; `off` takes all of them too."""
    replay_off_every: int = 20
    """Afterwards it takes one in so many."""


QUICK = Sizes(
    method_prompts=1,
    max_tokens=24,
    num_prompts=1,
    ablation_tokens=16,
    double_tokens=24,
    auto_tokens=16,
    beam_widths=(5, 25),
    biases=(1.0, 0.5),
    max_rows=(4, 16),
    prior_prompts=4,
    prior_tokens=24,
    prior_shares=(1 / 4,),
    replay_requests=12,
    replay_tokens=12,
    replay_cold=4,
    replay_off_every=4,
)


def sizes_of(config: MethodsConfig) -> Sizes:
    """As the flags say."""
    return QUICK if config.is_quick else Sizes()


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
            target=TARGET,
            draft=self.draft,
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
