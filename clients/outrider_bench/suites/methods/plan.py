"""How much of everything is measured: once in full, and once in two minutes, to see it work."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_bench.config import MethodsConfig

DRAFT_C5, DRAFT_C2_5 = "demo/draft-c5", "demo/draft-c2.5"
DRAFT_SLOW = "demo/draft-c2.2"
"""A forward takes about twenty times as long as one of the demo pair's."""


@dataclass(frozen=True, slots=True)
class MethodsSizes:
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


QUICK = MethodsSizes(
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


def sizes_of(config: MethodsConfig) -> MethodsSizes:
    """As the flags say."""
    return QUICK if config.is_quick else MethodsSizes()
