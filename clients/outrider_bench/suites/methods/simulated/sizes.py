"""Sizes of the simulated parts: how much is generated, in full and to see them work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulatedSizes:
    """Says how much is generated in simulated time."""

    num_prompts: int = 12
    tokens: int = 32
    """Limit of each text."""
    budgets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Outcomes of SAGUARO that are drafted for."""
    uniform_budgets: tuple[int, ...] = (8, 16, 32)
    """Those at which a uniform fan-out is held beside the geometric one."""
    source_tokens: int = 64
    """Limit of each text of the sources without a draft model, which fill while it runs."""
    beam_widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    """K of CARD."""
    biases: tuple[float, ...] = (1.0, 0.5, 0.25)
    """C of SAGUARO sampling."""
    double_tokens: int = 48
    """Limit of each text of DOUBLE, whose matches depend on how far it has come."""
    rejected_prompts: int = 64
    """Prompts on which DOUBLE's rejected tier is judged: what it adds is a few percent."""
    depths: tuple[int, ...] = (1, 2, 5, 10, 16)
    """d of DOUBLE: most retrieved tokens at a time."""
    match_lens: tuple[int, ...] = (1, 2, 3, 4, 6, 10)
    """n of DOUBLE: longest n-gram that is looked up."""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Drafted tokens of a round of speculative decoding."""
    replay_requests: int = 90
    """Requests of each replay to a service that is used."""
    replay_cold: int = 10
    replay_tokens: int = 20
    near_shares: tuple[float, ...] = (0.0, 0.2, 0.4)
    """Shares of near-repeats among the requests after the cold start."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Generations at once, the last one the most."""
    batch_tokens: int = 24
    batch_repeats: int = 3
    """Seeds of the batches, which intervals are drawn from: texts that run together have no times of their own."""


QUICK_SIZES = SimulatedSizes(
    num_prompts=1,
    tokens=12,
    source_tokens=12,
    budgets=(2, 8),
    uniform_budgets=(8,),
    beam_widths=(4, 16),
    biases=(1.0, 0.5),
    double_tokens=12,
    rejected_prompts=1,
    depths=(1, 10, 16),
    match_lens=(1, 4),
    gammas=(1, 4),
    replay_requests=6,
    replay_cold=2,
    near_shares=(0.4,),
    batches=(2,),
    batch_repeats=1,
)
