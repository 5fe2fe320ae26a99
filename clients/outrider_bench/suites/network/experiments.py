"""The experiments of the network suite: contenders, temperatures, round trips; in full, and small."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider_bench.config import NetworkConfig
from outrider_bench.experiment import PLAIN, TARGET, Contender, Experiment, contender
from outrider_cli.links.direction import LinkSettings
from outrider_cli.prompts import Prompt, choose, default_prompts

SMALL_TARGET = "demo/target"
"""Generates the same texts as the inflated target, at a twentieth of its cost."""
WAN_RTT_MS = 40.0
LOSSY = LinkSettings(delay_ms=WAN_RTT_MS / 2, jitter_ms=5.0, rate_up_mbit=1.0, loss=0.01)
"""Up is from the speculator, at the edge, to the verifier."""
WITHOUT_LOSS = LinkSettings(delay_ms=WAN_RTT_MS / 2, jitter_ms=5.0, rate_down_mbit=1.0)
"""Settings for a proxy, which cannot lose packets. The verifier dials the speculator, so its answers are down."""
EDGE_RTT_MS = 40.0


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """Says how much is measured."""

    target: str = TARGET
    num_prompts: int = 2
    """Prompts of the round trips, of the WAN and of the edge."""
    max_tokens: int = 64
    """Limit of each generation."""
    edge_tokens: tuple[int, ...] = (64, 128, 256)
    """Lengths at the edge: the first token takes as long as anywhere, the gain is in the others."""
    rtts_ms: tuple[float, ...] = (0.0, 2.0, 10.0, 40.0, 100.0)
    """Round trips. The first must be 0: speeds are shown as shares of the speed there."""
    sampled_rtts_ms: tuple[float, ...] = (0.0, 40.0)
    """Round trips of the texts at temperature 1."""
    text_prompts: int = 4
    """Prompts of the comparison of texts over the WAN."""
    watched_prompts: int = 8
    watched_tokens: int = 64
    """Length of each text in which the draft model is watched."""
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
    """Choose the sizes that the flags ask for."""
    return QUICK if config.is_quick else NetworkSizes()


RATIO: dict[str, Any] = {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"}
RATIO_RULE = "ratio rule"
WIDE = contender("card", "K = 50", card={"beam_width": 50})
METHODS = ("speculative", "pearl", "saguaro", "card", "double", "best-first", "auto")
SAMPLED_METHODS = ("best-first", "auto")
"""Methods that run at temperature 1: those that claims are about."""
RATIO_METHODS = ("pearl", "saguaro", "double", "speculative")
WAN_METHODS = ("pearl", "best-first", "auto")
# METHOD_UNSPECIFIED on the wire, which is the server's own default.
EDGE = Contender("edge", driver="edge", options={"method": "unspecified"})
"""An application that asks the edge, which does as it likes."""
WAN, WAN_TEXTS, TRAFFIC = "wan", "wan-texts", "bytes"


def rtt_name(rtt_ms: float, temperature: float) -> str:
    """Return the name of the experiment at a round trip."""
    return f"rtt-{rtt_ms:g}-T{temperature:g}"


def edge_name(num_tokens: int) -> str:
    """Return the name of the experiment with texts of `num_tokens` tokens."""
    return f"edge-{num_tokens}"


def experiments_of(parts: Iterable[str], sizes: NetworkSizes, repeats: int) -> list[Experiment]:
    """List all experiments of these parts."""
    return [experiment for part in parts if part in _PARTS for experiment in _PARTS[part](sizes, repeats)]


def _round_trips(sizes: NetworkSizes, repeats: int) -> list[Experiment]:
    everyone = (PLAIN, *map(contender, METHODS))
    sampled = (PLAIN, *map(contender, SAMPLED_METHODS))
    wanted = [(rtt_ms, 0.0, everyone) for rtt_ms in sizes.rtts_ms]
    wanted += [(rtt_ms, 1.0, sampled) for rtt_ms in sizes.sampled_rtts_ms]
    return [
        Experiment(
            rtt_name(rtt_ms, temperature),
            "rtt",
            f"Round trip {rtt_ms:g} ms, T = {temperature:g}",
            contenders,
            (temperature,),
            _code(sizes.num_prompts),
            sizes.max_tokens,
            repeats,
            target=sizes.target,
            rtt_ms=rtt_ms,
        )
        for rtt_ms, temperature, contenders in wanted
    ]


def _traffic(sizes: NetworkSizes, _: int) -> list[Experiment]:
    methods = (contender("pearl"), WIDE, *map(contender, ("best-first", "saguaro", "double", "auto")))
    by_ratio = tuple(contender(method, RATIO_RULE, **RATIO) for method in RATIO_METHODS)
    return [
        Experiment(
            f"{TRAFFIC}-T{temperature:g}",
            "bytes",
            f"Bytes at T = {temperature:g}",
            contenders,
            (temperature,),
            _code(sizes.num_prompts),
            sizes.max_tokens,
            # Bytes are counted, not timed: repeats would say the same.
            repeats=1,
            target=sizes.target,
        )
        for temperature, contenders in ((0.0, methods), (1.0, methods + by_ratio))
    ]


def _wan(sizes: NetworkSizes, repeats: int) -> list[Experiment]:
    everyone = (PLAIN, *map(contender, WAN_METHODS))
    texts = _code(sizes.text_prompts)
    return [
        Experiment(
            WAN,
            "wan",
            "Speed",
            everyone,
            (0.0,),
            _code(sizes.num_prompts),
            sizes.max_tokens,
            repeats,
            target=sizes.target,
        ),
        Experiment(
            WAN_TEXTS,
            "wan",
            "Texts: a small target in float32",
            everyone,
            (0.0, 1.0),
            texts,
            sizes.max_tokens,
            repeats=1,
            target=SMALL_TARGET,
            dtype="float32",
        ),
    ]


def _edge(sizes: NetworkSizes, repeats: int) -> list[Experiment]:
    note = "off: the cloud decodes plainly and every token crosses the way. edge: a speculator beside the application."
    return [
        Experiment(
            edge_name(num_tokens),
            "edge",
            f"What an application at the edge sees: texts of {num_tokens} tokens",
            (PLAIN, EDGE),
            (0.0,),
            _code(sizes.num_prompts),
            num_tokens,
            repeats,
            target=sizes.target,
            note=note,
        )
        for num_tokens in sizes.edge_tokens
    ]


def _code(num_prompts: int) -> tuple[Prompt, ...]:
    return tuple(choose(default_prompts(), ["code"], num_prompts))


_PARTS: dict[str, Callable[[NetworkSizes, int], list[Experiment]]] = {
    "rtt": _round_trips,
    "bytes": _traffic,
    "wan": _wan,
    "edge": _edge,
}
"""The part `simulation` runs nothing on services."""
