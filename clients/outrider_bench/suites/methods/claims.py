"""The claims of each part of the methods suite, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider_bench.experiment import LLAMA_CPP_CONTENDERS, OFF, label_of
from outrider_bench.measured import Measured
from outrider_bench.result import Measurement, above, at_least, claim, reported, share_of
from outrider_bench.suites.methods.experiments import (
    ABLATIONS,
    ALL_METHODS,
    AS_IN_THE_PAPER,
    CHAIN,
    DRAFT_C2_5,
    DRAFT_C5,
    FIXED_METHODS,
    GEOMETRIC,
    GREEDY_DRAFT,
    HOT,
    NO_NOISE,
    OTHER_CATEGORIES,
    QUERY_ONLY,
    RATIO_RULE,
    SHARED_NOISE,
    TEMPERATURES,
    UNIFORM,
    MethodsSizes,
)
from outrider_bench.suites.methods.replay import Replay

BEST_FIRST = ("best-first", f"best-first {CHAIN}")
AT_BEST = {0.0: 5.0, 0.7: 2.8, 1.0: 2.4}
"""Asked of best-first, by temperature."""
AUTO_OVER_LLAMA_CPP = {0.0: 1.25, 0.7: 1.25, 1.0: 1.15}
"""Asked of auto beside llama.cpp's best setting in the same run, by temperature."""
SAGUARO_OVER_SPECULATIVE = {0.0: 1.12, 0.7: 1.08}
SAGUARO_OVER_OFF = {0.0: 4.6, 0.7: 2.7, 1.0: 2.4}
ROWS_CLAIMED = 16
NO_OWN_TEXT = "no dynamic, no rejected"


@dataclass(frozen=True, slots=True)
class MethodsEvidence:
    """All that was measured."""

    measured: Measured
    sizes: MethodsSizes
    replay: Replay | None = None
    speed_ratios: Mapping[str, float] = field(default_factory=dict)
    """C by draft model: how many of its forwards fit into one of the target."""


def claims_of(parts: Sequence[str], evidence: MethodsEvidence) -> list[Measurement]:
    """Return the claims of these parts."""
    return [one for part in parts for one in _CLAIMS[part](evidence)]


def _methods(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "methods"
    claims = []
    for t, limit in SAGUARO_OVER_SPECULATIVE.items():
        ratio = measured.ratio(part, "saguaro", "speculative", t)
        claims.append(at_least(part, f"T = {t:g}: saguaro by speculative", ratio, limit))
    for t, limit in SAGUARO_OVER_OFF.items():
        claims.append(at_least(part, f"T = {t:g}: saguaro by off", measured.speedup(part, "saguaro", t), limit))
    for t, limit in AT_BEST.items():
        claims.append(at_least(part, f"T = {t:g}: best-first by off", measured.speedup(part, "best-first", t), limit))
    fixed = [label for label in map(label_of, ALL_METHODS) if label not in (OFF, "auto")]
    for t in TEMPERATURES:
        others = [label for label in fixed if label not in BEST_FIRST]
        ratio, remark = measured.beside_the_best(part, "best-first", others, t)
        claims.append(at_least(part, f"T = {t:g}: best-first by every other method", ratio, 0.98, remark))
    for t in TEMPERATURES:
        ratio, remark = measured.beside_the_best(part, "auto", fixed, t)
        claims.append(at_least(part, f"T = {t:g}: auto by the best fixed method", ratio, 0.95, remark))
    if evidence.sizes.llama_cpp:
        labels = [label_of(one) for one in LLAMA_CPP_CONTENDERS]
        for t, limit in AUTO_OVER_LLAMA_CPP.items():
            ratio, remark = measured.beside_the_best(part, "auto", labels, t)
            claims.append(at_least(part, f"T = {t:g}: auto by llama.cpp's best setting", ratio, limit, remark))
    return claims


def _saguaro(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part, fan_out = evidence.measured, "saguaro", "saguaro-fan-out"
    slow = measured.ratio("saguaro-c5", "saguaro", "speculative", 0.0)
    remark = _speed_ratio_remark(evidence, DRAFT_C5)
    claims = [
        at_least(part, "T = 0, slow draft model: saguaro by speculative", slow, 1.12, remark),
        at_least(part, "T = 1: hit rate", measured.hit_rate(fan_out, "saguaro", 1.0), 0.80),
        reported(part, f"T = 1: hit rate, {NO_NOISE}", measured.hit_rate(fan_out, f"saguaro {NO_NOISE}", 1.0)),
    ]
    # The SSD paper claims more hits and more speed for geometric fan-out, the more so at higher temperatures. Greedily
    # there is nothing to compare: the experiment has the sampled temperatures only.
    for t in TEMPERATURES[1:]:
        for noise in ("", f" {AS_IN_THE_PAPER}"):
            geometric, uniform = (f"saguaro {shape}{noise}" for shape in (GEOMETRIC, UNIFORM))
            what = f"geometric by uniform fan-out{f', {NO_NOISE}' if noise else ''}"
            hits = share_of(measured.hit_rate(fan_out, geometric, t), measured.hit_rate(fan_out, uniform, t))
            claims.append(above(part, f"T = {t:g}: hit rate, {what}", hits, 1.0))
            speed = measured.ratio(fan_out, geometric, uniform, t)
            claims.append(above(part, f"T = {t:g}: tokens/s, {what}", speed, 1.0))
    return claims


def _card(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part, sweep = evidence.measured, "card", "card-width"
    query = f"card {QUERY_ONLY}"
    # CARD, section 3.3, Table 2: the cache alone already pays, and correction adds to it.
    claims = []
    for t in (0.0, 0.7):
        claims.append(above(part, f"T = {t:g}: query only by off", measured.speedup(part, query, t), 1.0))
        ratio = measured.ratio(part, "card", query, t)
        claims.append(above(part, f"T = {t:g}: query and correct by query only", ratio, 1.0))
    # CARD, section 3.4, Figure 6: the hit rate rises with K, up to 97 %, while the speed rises and then falls.
    labels = [f"card K = {width}" for width in evidence.sizes.beam_widths]
    first, last, t = labels[0], labels[-1], 0.0
    rates = [measured.hit_rate(sweep, label, t) for label in labels]
    speeds = {label: measured.throughput(sweep, label, t) or 0.0 for label in labels}
    best = max(speeds, key=lambda label: speeds[label])
    rise, fall = measured.ratio(sweep, best, first, t), measured.ratio(sweep, best, last, t)
    remark = f"best: {best.removeprefix('card ')}"
    ends = first.removeprefix("card "), last.removeprefix("card ")
    known = [rate for rate in rates if rate is not None]
    return [
        *claims,
        above(
            part, f"T = {t:g}: hit rate, the highest by {ends[0]}", share_of(max(known, default=None), rates[0]), 1.0
        ),
        at_least(part, f"T = {t:g}: highest hit rate", max(known, default=None), 0.9),
        above(part, f"T = {t:g}: tokens/s, the best K by {ends[0]} (rises)", rise, 1.0, remark),
        above(part, f"T = {t:g}: tokens/s, the best K by {ends[1]} (falls)", fall, 1.0, remark),
    ]


def _double(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "double"
    ceiling, remark = evidence.speed_ratios.get(DRAFT_C2_5), _speed_ratio_remark(evidence, DRAFT_C2_5)
    # DOUBLE, Theorem 3: parallel drafting without retrieval cannot be faster than C. Section 4.4: retrieval lifts that.
    pearl, double = (measured.speedup(part, label, 0.0) for label in ("pearl", "double"))
    claims = [
        claim(part, "T = 0: pearl by off stays below C", pearl, "<", ceiling, remark),
        above(part, "T = 0: double by off exceeds C", double, ceiling, remark),
        at_least(part, "T = 0: double by pearl", measured.ratio(part, "double", "pearl", 0.0), 1.3),
        reported(part, "T = 0.7: double by pearl", measured.ratio("double-sampled", "double", "pearl", 0.7)),
    ]
    for name in (name for name in ABLATIONS if name != NO_OWN_TEXT):
        ratio = measured.ratio(part, "double", f"double {name}", 0.0)
        claims.append(above(part, f"T = 0: double by double with {name}", ratio, 1.0))
    ratio = measured.ratio(part, "double no dynamic tier", f"double {NO_OWN_TEXT}", 0.0)
    claims.append(above(part, "T = 0: the rejected tier, where there is no dynamic one", ratio, 1.0))
    claims.append(_saturation(evidence))
    return claims


def _saturation(evidence: MethodsEvidence) -> Measurement:
    """Claim that the last step of the prior's size brings little of all that the prior brings."""
    # DOUBLE, section 5.3, Table 3: beyond ten rounds of prior the gains saturate.
    measured, part = evidence.measured, "double"
    last = len(evidence.sizes.prior_shares) - 1
    # By pearl, which knows no prior and takes turns with each.
    none, whole = (measured.ratio(part, label, "pearl", 0.0) for label in ("double no prior", "double"))
    most = measured.ratio(f"double-prior-{last}", "double", "pearl", 0.0)
    what = f"share of the prior's gain that its last {1 - evidence.sizes.prior_shares[-1]:.0%} bring (saturates)"
    share = None
    # Where the whole prior brings nothing, its parts have no share.
    if none is not None and whole is not None and most is not None and whole > none:
        share = (whole - most) / (whole - none)
    return claim(part, what, share, "<=", 0.5, "of tokens/s by pearl's")


def _spacelike(evidence: MethodsEvidence) -> list[Measurement]:
    replay, part = evidence.replay, "spacelike"
    last, near, cold = (None, None, None) if replay is None else (replay.last_third, replay.near, replay.cold)
    return [
        at_least(part, "last third of the requests by off", last, 1.6),
        at_least(part, "near-repeats by off", near, 3.0),
        at_least(part, "cold start by off", cold, 0.97),
    ]


def _rows(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part, chain = evidence.measured, "rows", f"best-first {CHAIN}"
    base = measured.tokens_per_forward(part, chain, 1.0)
    claims = []
    for count in evidence.sizes.max_rows:
        ratio = share_of(measured.tokens_per_forward(part, f"best-first rows = {count}", 1.0), base)
        what = f"T = 1: tokens per forward, sub-tree of {count} rows by chain"
        claims.append(at_least(part, what, ratio, 1.15) if count == ROWS_CLAIMED else reported(part, what, ratio))
    return claims


def _noise(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "noise"
    return [
        reported(part, f"T = 1: acceptance, {name}", measured.acceptance(part, f"speculative {name}", 1.0))
        for name in (SHARED_NOISE, GREEDY_DRAFT, RATIO_RULE)
    ]


def _auto(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "auto"
    claims = []
    for category in OTHER_CATEGORIES:
        for t in TEMPERATURES:
            ratio, remark = measured.beside_the_best(part, "auto", FIXED_METHODS, t, category)
            claims.append(at_least(part, f"T = {t:g}, {category}: auto by the best of three", ratio, 0.95, remark))
            plain = measured.speedup(part, "auto", t, category)
            claims.append(at_least(part, f"T = {t:g}, {category}: auto by off", plain, 0.98))
    for name, what, t in (
        ("auto-hot", f"T = {HOT:g}", HOT),
        ("auto-untrained", "untrained draft model, T = 0.7", 0.7),
        ("auto-slow", "draft model slowed twenty times, T = 0.7", 0.7),
    ):
        claims.append(at_least(part, f"{what}: auto by off", measured.speedup(name, "auto", t), 0.98))
    return claims


def _speed_ratio_remark(evidence: MethodsEvidence, draft: str) -> str:
    ratio = evidence.speed_ratios.get(draft)
    return f"C = {ratio:.2f}" if ratio else "C was not measured"


_CLAIMS: dict[str, Callable[[MethodsEvidence], list[Measurement]]] = {
    "methods": _methods,
    "saguaro": _saguaro,
    "card": _card,
    "double": _double,
    "spacelike": _spacelike,
    "rows": _rows,
    "noise": _noise,
    "auto": _auto,
}
