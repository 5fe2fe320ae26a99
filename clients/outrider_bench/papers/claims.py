"""The papers' claims, one row each: a number of a method, relative to another one's, and what the paper says of it.

Pairs of models, hardware and prompts are the papers' own, so a figure says how much a method is worth there. A
comparison of Outrider's methods with themselves, or a check of a formula, is no claim of a paper, and has no row.

* CARD: Zhou et al., "CARD: A Cache-Assisted Parallel Speculative Decoding Framework".
* SAGUARO: Kumar, Dao and May, "Speculative Speculative Decoding".
* DOUBLE: "Breaking the Acceleration Limit via Double Retrieval Speculative Parallelism".
* Token Recycling: Luo et al. 2024, "Turning Trash into Treasure".
* Lookahead: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding".
* REST: He et al. 2023, "REST: Retrieval-Based Speculative Decoding".
* Takeoff: Doubleword's article on spacelike speculative decoding.
* the tutorial: a chapter on speculative decoding, with the arithmetic of Leviathan et al. 2023.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from outrider_bench.papers.prompts import NEAR

SPEED, HITS, READY_HITS, ACCEPTANCE, TOKENS = "tokens/s", "hits", "ready hits", "acceptance", "tokens a round"
"""Metrics: see `papers.measured`."""
_RELATIONS = {">": operator.gt, "<": operator.lt}


@dataclass(frozen=True, slots=True)
class Claim:
    """A number of a contender, divided by that of its base, and the paper's statement about it."""

    paper: str
    what: str
    source: str
    """The place in the paper, with its models or data if it names them."""
    experiment: str
    temperature: float
    contender: str
    """Label of a contender of the experiment."""
    base: str = "off"
    """Label of the contender that it is divided by; empty means a plain number, which is no effect."""
    figure: float | None = None
    """The paper's number; None means that it uses only words."""
    metric: str = SPEED
    relation: str = ">"
    """The side of `bound` on which the effect has the right sign: > or <."""
    bound: float = 1.0
    concurrency: int = 1
    category: str = ""
    """Category of the prompts; empty means all."""

    def has_right_sign(self, value: float) -> bool:
        """Returns True if a value lies on the paper's side of the bound."""
        return bool(_RELATIONS[self.relation](value, self.bound))

    def reaches_figure(self, value: float) -> bool:
        """Returns True if a value is at least the paper's; there must be a figure."""
        assert self.figure is not None
        return value >= self.figure


SPECULATIVE = "speculative as published"
CARD = "card as published"
PEARL = "pearl"
SAGUARO = "saguaro as published"
DOUBLE = "double as published"
SPACELIKE = "spacelike as published"
C25, C5, C2_5 = "pair-25", "pair-5", "pair-2.5"
"""Experiments of all methods, by the ratio of a target forward's time to a draft forward's."""
CARD_QUERY, CARD_WIDTH = "card-query", "card-width"
SAGUARO_BUDGET, SAGUARO_BIAS, SAGUARO_FALLBACK = "saguaro-budget", "saguaro-bias", "saguaro-fallback"
DOUBLE_PARTS, DOUBLE_DEPTH, DOUBLE_BATCH = "double-parts", "double-depth", "double-batch"
REPLAY = "spacelike-replay"

_LLAMA = "LLaMA-3.3-70B"

CLAIMS: tuple[Claim, ...] = (
    Claim("the tutorial", "by off", "2x to 3x (Impact on Inference Efficiency)", C25, 0.0, SPECULATIVE, figure=2.0),
    Claim("the tutorial", "by off", "2x at 80 % acceptance (Draft Model Selection)", C25, 0.7, SPECULATIVE, figure=2.0),
    Claim("the tutorial", "by off", "1.77x to 1.88x (CARD, Table 1, Llama 2)", C25, 1.0, SPECULATIVE, figure=1.77),
    Claim("CARD", "by off", "4.72x (Table 1, GSM8K, Llama 3 70B/1B)", C25, 0.0, CARD, figure=4.72),
    Claim("CARD", "by off", "2.30x to 2.74x (Table 1, Llama 2 70B/7B)", C25, 1.0, CARD, figure=2.30),
    Claim("CARD", "query only by off", "30.23 by 8.75 (Table 2)", CARD_QUERY, 0.0, "card query only", figure=3.45),
    Claim("CARD", "correction on top", "41.34 by 30.23 (Table 2)", CARD_QUERY, 0.0, "card", "card query only"),
    Claim(
        "CARD", "next token known, K = 64", "97 % at most (section 3.4, Fig. 6)", CARD_WIDTH, 0.0, "card K = 64", "",
        0.97, metric=HITS,
    ),
    Claim(
        "CARD", "next token known, K = 16 by 4", "rises with K (section 3.4, Fig. 6)", CARD_WIDTH, 0.0, "card K = 16",
        "card K = 4", metric=HITS,
    ),
    Claim("CARD", "K = 16 by 4", "rises with K (section 3.4, Fig. 6)", CARD_WIDTH, 0.0, "card K = 16", "card K = 4"),
    Claim(
        "CARD", "K = 64 by 16", "then falls (section 3.4, Fig. 6)", CARD_WIDTH, 0.0, "card K = 64", "card K = 16",
        relation="<",
    ),
    Claim("SAGUARO", "by off", "up to 5x (abstract)", C25, 0.0, SAGUARO, figure=5.0),
    Claim("SAGUARO", "by speculative", "up to 2x (abstract)", C5, 0.0, SAGUARO, SPECULATIVE, 2.0),
    *(
        Claim("SAGUARO", "by speculative", "faster at every temperature (Experiment)", C5, t, SAGUARO, SPECULATIVE)
        for t in (0.7, 1.0)
    ),
    *(
        claim
        for t in (0.7, 1.0)
        for claim in (
            Claim(
                "SAGUARO", "hits, B = 64 by 1", "hits grow with the size of the cache (Experiment)", SAGUARO_BUDGET, t,
                "saguaro B = 64", "saguaro B = 1", metric=READY_HITS,
            ),
            Claim(
                "SAGUARO", "hits, geometric by uniform fan-out", "more hits (Experiment)", SAGUARO_BUDGET, t,
                "saguaro B = 16", "saguaro uniform B = 16", metric=READY_HITS,
            ),
            Claim(
                "SAGUARO", "geometric by uniform fan-out", "more speed (Experiment)", SAGUARO_BUDGET, t,
                "saguaro B = 16", "saguaro uniform B = 16",
            ),
            Claim(
                "SAGUARO", "hits, C = .25 by 1", "C trades acceptance for hits (Method)", SAGUARO_BIAS, t,
                "saguaro C = 0.25", "saguaro C = 1", metric=READY_HITS,
            ),
            Claim(
                "SAGUARO", "acceptance, C = .25 by 1", "C trades acceptance for hits (Method)", SAGUARO_BIAS, t,
                "saguaro C = 0.25", "saguaro C = 1", metric=ACCEPTANCE, relation="<",
            ),
        )
    ),
    Claim(
        "SAGUARO", "after a miss, random by draft, alone", "drafting anew is best alone (Experiment)", SAGUARO_FALLBACK,
        0.7, "saguaro fallback random", "saguaro fallback draft", relation="<",
    ),
    Claim(
        "SAGUARO", "after a miss, random by draft, 16 at once", "fast backups win in batches (Experiment)",
        SAGUARO_FALLBACK, 0.7, "saguaro fallback random", "saguaro fallback draft", concurrency=16,
    ),
    Claim("DOUBLE", "by off", f"5.33x at C = 4.7 (Table 1, HumanEval, {_LLAMA})", C5, 0.0, DOUBLE, figure=5.33),
    Claim("DOUBLE", "by off", f"4.70x (Table 2, HumanEval, {_LLAMA})", C5, 1.0, DOUBLE, figure=4.70),
    Claim("DOUBLE", "by pearl", f"4.27x by 3.55x on average (Table 1, {_LLAMA})", C5, 0.0, DOUBLE, PEARL, 1.20),
    Claim("DOUBLE", "by pearl", f"3.77x by 3.34x on average (Table 2, {_LLAMA})", C5, 1.0, DOUBLE, PEARL, 1.13),
    Claim("DOUBLE", "pearl by off", f"3.55x (Table 1, {_LLAMA})", C5, 0.0, PEARL, figure=3.55),
    Claim("DOUBLE", "pearl by off", f"3.34x (Table 2, {_LLAMA})", C5, 1.0, PEARL, figure=3.34),
    Claim("DOUBLE", "pearl stays below C", "Theorem 3", C2_5, 0.0, PEARL, relation="<", bound=2.5),
    Claim("DOUBLE", "double exceeds C", "section 4.4, Table 1", C2_5, 0.0, DOUBLE, bound=2.5),
    *(
        claim
        for t in (0.0, 1.0)
        for claim in (
            Claim(
                "DOUBLE", "draft-side retrieval", "4.50x to 5.33x (Fig. 5, HumanEval)", DOUBLE_PARTS, t, "double",
                "double no draft retrieval", None if t else 1.18,
            ),
            Claim(
                "DOUBLE", "target-side retrieval, tokens", "11.5 to 14.35 tokens (Fig. 5, HumanEval)", DOUBLE_PARTS, t,
                "double", "double no target retrieval", None if t else 1.25, metric=TOKENS,
            ),
            Claim(
                "DOUBLE", "prior", "2.35x to 2.84x (Table 3, HumanEval, Qwen3-32B)", DOUBLE_PARTS, t, "double",
                "double no prior", None if t else 1.21,
            ),
            Claim(
                "DOUBLE", "rejected tier", "2.14x to 2.30x (Table 9, MT-Bench, Qwen3-32B)", DOUBLE_PARTS, t, "double",
                "double no rejected tier", None if t else 1.07,
            ),
        )
    ),
    Claim("DOUBLE", "d = 10 by 1", "grows with d (Fig. 6)", DOUBLE_DEPTH, 0.0, "double d = 10", "double d = 1"),
    Claim(
        "DOUBLE", "tokens a round, d = 16 by 10", "saturates beyond 10 (Fig. 6)", DOUBLE_DEPTH, 0.0, "double d = 16",
        "double d = 10", metric=TOKENS, relation="<", bound=1.05,
    ),
    Claim(
        "DOUBLE", "16 at once, by 16 of off", "1.73x (Table 6, HumanEval, Qwen3-32B)", DOUBLE_BATCH, 0.0, DOUBLE,
        figure=1.73, concurrency=16,
    ),
    Claim("Takeoff", "all requests by off", "60 to 100-120 tokens/s (Results)", REPLAY, 0.0, SPACELIKE, figure=1.7),
    Claim(
        "Takeoff", "near-repeats by off", "60 to 200 tokens/s (Results)", REPLAY, 0.0, SPACELIKE, figure=3.3,
        category=NEAR,
    ),
    Claim("Takeoff", "all requests by off", "faster (Results)", REPLAY, 0.7, SPACELIKE),
    *(
        Claim(paper, "by off", source if t == 0 else "in words", C25, t, label, figure=None if t else figure)
        for t in (0.0, 0.7, 1.0)
        for paper, label, figure, source in (
            ("Token Recycling", "retrieval token-recycling", 2.0, "about 2x for all sizes of models (abstract)"),
            ("Lookahead", "retrieval ngram-pool", 1.8, "up to 1.8x on MT-Bench, with Jacobi rows (abstract)"),
            ("REST", "retrieval rest", 1.62, "1.62x to 2.36x on code or text, 7B and 13B (abstract)"),
        )
    ),
)  # fmt: skip
PAPERS: tuple[str, ...] = tuple(dict.fromkeys(claim.paper for claim in CLAIMS))
