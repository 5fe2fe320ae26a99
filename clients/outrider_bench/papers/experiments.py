"""The runs for the papers' claims: contenders, prompts, and simulated times of forwards and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.methods import METHODS
from outrider_bench.costs import CPU, GPU, Costs
from outrider_bench.experiment import AS_PUBLISHED, PLAIN, Contender, Experiment, as_published, contender
from outrider_bench.papers.claims import (
    C2_5,
    C5,
    C25,
    CARD_QUERY,
    CARD_WIDTH,
    CLAIMS,
    DOUBLE_BATCH,
    DOUBLE_DEPTH,
    DOUBLE_PARTS,
    REPLAY,
    SAGUARO_BIAS,
    SAGUARO_BUDGET,
    SAGUARO_FALLBACK,
)
from outrider_bench.papers.prompts import code, replay_requests

TEMPERATURES = (0.0, 0.7, 1.0)
PAIRS = {C25: 25.0, C5: 5.0, C2_5: 2.5}
"""Experiments of all methods, by C: the ratio of a target forward's time to a draft forward's."""
TRAINLESS = {"token-recycling": "SOURCE_RECYCLED", "ngram-pool": "SOURCE_POOL", "rest": "SOURCE_PRIOR"}
"""Sources of retrieval that represent a paper's method without a draft model."""
_TIERS = ("PRIOR", "DYNAMIC", "SHARED", "REJECTED", "RING")
_CHAIN: dict[str, Any] = {"num_speculative_tokens": 8, "min_path_probability": 0.0}
"""SAGUARO's chains: of fixed length, however improbable they become."""
_NEAR_SHARE = 0.4
"""Share of near-repeats among the requests to a service in use, after those of the cold start."""
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is generated."""

    num_prompts: int = 12
    tokens: int = 32
    """Limit of each text."""
    double_tokens: int = 48
    """Limit of each text of DOUBLE's parts: its matches depend on the progress of the text."""
    batch_tokens: int = 24
    batch_repeats: int = 3
    """Seeds of a batch, from which intervals are drawn: texts that run together have no times of their own."""
    num_requests: int = 90
    num_cold: int = 10
    """Requests to a service in use: in total, and before the first near-repeat."""
    request_tokens: int = 20


QUICK = Sizes(1, 12, 12, 12, 1, 6, 2, 12)


def experiments_of(papers: Iterable[str], sizes: Sizes) -> list[Experiment]:
    """Returns the experiments that the claims of these papers need."""
    chosen = set(papers)
    wanted = {claim.experiment for claim in CLAIMS if claim.paper in chosen}
    return [one for one in _all(sizes) if one.name in wanted]


def costs_of(speed_ratio: float) -> Costs:
    """Returns the times of a pair on two devices with this speed ratio."""
    return replace(GPU, draft_ms=GPU.target_ms[1] / speed_ratio - GPU.draft_row_ms)


def _all(sizes: Sizes) -> Iterator[Experiment]:
    prompts = code(sizes.num_prompts)

    def experiment(
        name: str, contenders: Iterable[Contender], temperatures: tuple[float, ...], costs: Costs, **more: Any
    ) -> Experiment:
        defaults: dict[str, Any] = {"prompts": prompts, "max_tokens": sizes.tokens, "repeats": 1}
        return Experiment(name, (PLAIN, *contenders), temperatures, costs=costs, **defaults | more)

    # The longest first, so that the last worker is not at one of them when all others have ended.
    for name, speed_ratio in PAIRS.items():
        yield experiment(name, _all_methods(speed_ratio), TEMPERATURES, costs_of(speed_ratio), has_prior=True)
    parts = (contender("double"), *(contender("double", name, double=fields) for name, fields in _parts_of_double()))
    lasting = {"max_tokens": sizes.double_tokens, "has_prior": True}
    yield experiment(DOUBLE_PARTS, parts, (0.0, 1.0), costs_of(2.5), **lasting)
    depths = (contender("double", f"d = {depth}", double={"max_phrase_len": depth}) for depth in (1, 10, 16))
    yield experiment(DOUBLE_DEPTH, depths, (0.0,), costs_of(2.5), **lasting)
    batch = {"max_tokens": sizes.batch_tokens, "repeats": sizes.batch_repeats, "prompts": code(_BATCH)}
    yield experiment(
        DOUBLE_BATCH,
        [_published("double", 5.0)],
        (0.0,),
        costs_of(5.0),
        has_prior=True,
        concurrencies=(_BATCH,),
        **batch,
    )
    yield experiment(
        SAGUARO_FALLBACK,
        (_after_a_miss(name) for name in ("DRAFT", "RANDOM")),
        (0.7,),
        GPU,
        concurrencies=(1, _BATCH),
        **batch,
    )
    yield experiment(SAGUARO_BUDGET, _budgets(), TEMPERATURES[1:], GPU)
    yield experiment(SAGUARO_BIAS, (_biased(bias) for bias in (1.0, 0.25)), TEMPERATURES[1:], GPU)
    query = (contender("card", "query only", card={"correction": False}), contender("card"))
    yield experiment(CARD_QUERY, query, (0.0,), CPU)
    widths = (contender("card", f"K = {width}", card={"beam_width": width}) for width in (4, 16, 64))
    yield experiment(CARD_WIDTH, widths, (0.0,), CPU)
    sharing = {"scope": "RETRIEVAL_SCOPE_TENANT", "contribute": True}
    requests = replay_requests(sizes.num_requests, sizes.num_cold, _NEAR_SHARE)
    using = (contender("spacelike", retrieval_params=sharing), as_published("spacelike", retrieval_params=sharing))
    yield experiment(REPLAY, using, (0.0, 0.7), GPU, prompts=requests, max_tokens=sizes.request_tokens)


def _all_methods(speed_ratio: float) -> Iterator[Contender]:
    """Yields each method as published and with the server's defaults; those without a draft model only at the greatest
    C."""
    for name, method in METHODS.items():
        if method.has_draft_model or name == "auto":
            yield contender(name)
            if method.published:
                yield _published(name, speed_ratio)
    if speed_ratio == max(PAIRS.values()):
        for name, source in TRAINLESS.items():
            yield contender("retrieval", name, rows="ROWS_TREE", retrieval_params={"sources": [source]})


def _published(method: str, speed_ratio: float) -> Contender:
    # The papers' gamma of parallel drafting: the tokens that the draft model makes during a target forward.
    chain = {"num_speculative_tokens": math.ceil(speed_ratio)} if method in ("card", "double") else {}
    return as_published(method, **chain)


def _parts_of_double() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the parameters of double without each of its parts."""
    yield "no draft retrieval", {"draft_retrieval": False}
    yield "no target retrieval", {"target_retrieval": False}
    for tier in ("prior", "rejected tier"):
        missing = tier.partition(" ")[0].upper()
        yield f"no {tier}", {"tiers": [f"SOURCE_{each}" for each in _TIERS if each != missing]}


def _budgets() -> Iterator[Contender]:
    # Without the target's noise, as in the paper.
    for budget in (1, 16, 64):
        yield contender("saguaro", f"B = {budget}", **_CHAIN, shared_noise=False, saguaro={"budget": budget})
    uniform = {"fan_out": "FAN_OUT_UNIFORM", "budget": 16}
    yield contender("saguaro", "uniform B = 16", **_CHAIN, shared_noise=False, saguaro=uniform)


def _biased(bias: float) -> Contender:
    rule = {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"}
    return contender("saguaro", f"C = {bias:g}", **_CHAIN, **rule, saguaro={"bias": bias, "budget": 16})


def _after_a_miss(name: str) -> Contender:
    return contender("saguaro", f"fallback {name.lower()}", saguaro={"fallback": f"FALLBACK_{name}", "budget": 16})


NOTE = (
    "In simulated time. Two devices side by side: a forward of the target takes 20 ms with 1 row, 22 with 64 and 30 "
    "with 256, one of the draft model 20 / C, a message .05. Query only and K of CARD: a core each, 20 ms up to 4 "
    f"rows, 30 with 16 and 47 with 32, .75 and .035 a row, .45. Without prefill. {AS_PUBLISHED}: the method does what "
    "its paper says and nothing else; chains of card and double are C tokens long. The prior is what the target says "
    "to files that it was trained on."
)
