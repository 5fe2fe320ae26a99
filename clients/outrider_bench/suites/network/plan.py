"""How much of everything the network's suite measures: once in full, and once in less than a minute, to see it work."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_bench.config import NetworkConfig
from outrider_bench.experiment import TARGET
from outrider_cli.links.line import LinkSettings

SMALL_TARGET = "demo/target"
"""What the inflated one says, at a twentieth of its cost."""
WAN_RTT_MS = 40.0
LOSSY = LinkSettings(delay_ms=WAN_RTT_MS / 2, jitter_ms=5.0, rate_up_mbit=1.0, loss=0.01)
"""Up is from the speculator, at the edge, to the verifier."""
WITHOUT_LOSS = LinkSettings(delay_ms=WAN_RTT_MS / 2, jitter_ms=5.0, rate_down_mbit=1.0)
"""The same for a proxy, as far as it goes. The verifier dials the speculator, so what comes back is down."""
EDGE_RTT_MS = 40.0


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """How much of everything."""

    target: str = TARGET
    num_prompts: int = 2
    """Of the round trips, of the WAN and of the edge."""
    max_tokens: int = 64
    """Of each generation."""
    edge_tokens: tuple[int, ...] = (64, 128, 256)
    """Of the generations at the edge: the first token takes as long as anywhere, the others are what is gained."""
    rtts_ms: tuple[float, ...] = (0.0, 2.0, 10.0, 40.0, 100.0)
    """Of the first, shares are taken: it must be 0."""
    sampled_rtts_ms: tuple[float, ...] = (0.0, 40.0)
    """At temperature 1."""
    text_prompts: int = 4
    """Of the comparison of texts over the WAN."""
    watched_prompts: int = 8
    watched_tokens: int = 64
    """Of each text in which the draft model is watched."""
    simulated_tokens: int = 300
    simulated_seeds: int = 2
    simulated_expansions: tuple[int, ...] = (1, 8, 16)
    """Nodes of a draft forward; the best of them counts."""


QUICK = NetworkSizes(
    target=SMALL_TARGET,
    num_prompts=1,
    max_tokens=12,
    edge_tokens=(12,),
    rtts_ms=(0.0, 10.0),
    sampled_rtts_ms=(0.0,),
    text_prompts=1,
    watched_prompts=1,
    watched_tokens=16,
    simulated_tokens=30,
    simulated_seeds=1,
    simulated_expansions=(8,),
)


def sizes_of(config: NetworkConfig) -> NetworkSizes:
    """As the flags say."""
    return QUICK if config.is_quick else NetworkSizes()
