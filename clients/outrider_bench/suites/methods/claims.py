"""The claims of each part of the methods suite, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider_bench.experiment import LLAMA_CPP_CONTENDERS, OFF, label_of
from outrider_bench.measured import Measured
from outrider_bench.prediction import expected_tokens
from outrider_bench.result import Measurement, above, at_least, claim, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.experiments import (
    AS_IN_THE_PAPER,
    BATCH_TEMPERATURE,
    CHAIN_LEN,
    DRAFT_C2_5,
    DRAFT_C5,
    FALLBACKS,
    FIXED_METHODS,
    GEOMETRIC,
    GREEDY_DRAFT,
    HOT,
    NO_NOISE,
    OTHER_CATEGORIES,
    QUERY_ONLY,
    RATIO_RULE,
    SERIAL,
    SHARED_NOISE,
    TEMPERATURES,
    UNIFORM,
    MethodsSizes,
)
from outrider_bench.suites.methods.replay import Replay
from outrider_bench.suites.methods.settings import ABLATIONS, ALL_METHODS, CHAIN, NO_OWN_TEXT
from outrider_bench.suites.methods.simulated.parts import SIMULATED

BEST_FIRST = ("best-first", f"best-first {CHAIN}")
AT_BEST = {0.0: 5.0, 0.7: 2.8, 1.0: 2.4}
"""Asked of best-first, by temperature."""
AUTO_OVER_LLAMA_CPP = {0.0: 1.25, 0.7: 1.25, 1.0: 1.15}
"""Asked of auto beside llama.cpp's best setting in the same run, by temperature."""
SAGUARO_OVER_SPECULATIVE = {0.0: 1.12, 0.7: 1.08}
SAGUARO_OVER_OFF = {0.0: 4.6, 0.7: 2.7, 1.0: 2.4}
ROWS_CLAIMED = 16


@dataclass(frozen=True, slots=True)
class MethodsEvidence:
    """All that was measured."""

    measured: Measured
    sizes: MethodsSizes
    replay: Replay | None = None
    speed_ratios: Mapping[str, float] = field(default_factory=dict)
    """C by draft model: how many of its forwards fit into one of the target."""


def claims_of(parts: Sequence[str], evidence: MethodsEvidence) -> list[Measurement]:
    """Return the claims of these parts, each beside its paper's figure; papers.NONE where there is no such figure."""
    claims = (one for part in parts for one in _claims_of_part(part, evidence))
    return [replace(one, paper=one.paper or papers.NONE) for one in claims]


def _claims_of_part(part: str, evidence: MethodsEvidence) -> list[Measurement]:
    if part in SIMULATED:
        return SIMULATED[part].claims(evidence.measured, evidence.sizes.simulated)
    return _CLAIMS[part](evidence)


def _methods(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "methods"
    claims = []
    for t, limit in SAGUARO_OVER_SPECULATIVE.items():
        ratio = measured.ratio(part, "saguaro", "speculative", t)
        what = f"T = {t:g}: saguaro by speculative"
        claims.append(at_least(part, what, ratio, limit, paper=papers.SAGUARO_BY_SPECULATIVE))
    for t, limit in SAGUARO_OVER_OFF.items():
        speedup = measured.speedup(part, "saguaro", t)
        claims.append(at_least(part, f"T = {t:g}: saguaro by off", speedup, limit, paper=papers.SAGUARO_BY_OFF))
    for t, limit in AT_BEST.items():
        claims.append(at_least(part, f"T = {t:g}: best-first by off", measured.speedup(part, "best-first", t), limit))
    fixed = [label_of(one) for one in ALL_METHODS if one.method not in (OFF, "auto")]
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
    what = "T = 0, slow draft model: saguaro by speculative"
    hits, alone = (measured.ready_hit_rate(fan_out, label, 1.0) for label in ("saguaro", f"saguaro {NO_NOISE}"))
    claims = [
        at_least(part, what, slow, 1.12, remark, papers.SAGUARO_BY_SPECULATIVE),
        at_least(part, "T = 1: hit rate", hits, 0.80, paper=papers.SAGUARO_HITS),
        reported(part, f"T = 1: hit rate, {NO_NOISE}", alone, paper=papers.SAGUARO_HITS),
    ]
    # The SSD paper claims more hits and more speed for geometric fan-out, the more so at higher temperatures. Greedily
    # there is nothing to compare: the experiment has the sampled temperatures only.
    for t in TEMPERATURES[1:]:
        for noise in ("", f" {AS_IN_THE_PAPER}"):
            geometric, uniform = (f"saguaro {shape}{noise}" for shape in (GEOMETRIC, UNIFORM))
            what = f"geometric by uniform fan-out{f', {NO_NOISE}' if noise else ''}"
            hits = share_of(
                measured.ready_hit_rate(fan_out, geometric, t), measured.ready_hit_rate(fan_out, uniform, t)
            )
            claims.append(above(part, f"T = {t:g}: hit rate, {what}", hits, 1.0, paper=papers.SAGUARO_FAN_OUT))
            speed = measured.ratio(fan_out, geometric, uniform, t)
            claims.append(above(part, f"T = {t:g}: tokens/s, {what}", speed, 1.0, paper=papers.SAGUARO_FAN_OUT))
    return claims


def _card(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part, sweep = evidence.measured, "card", "card-width"
    query = f"card {QUERY_ONLY}"
    # CARD, section 3.3, Table 2: the cache alone already pays, and correction adds to it.
    claims = []
    for t in (0.0, 0.7):
        cache, share = measured.speedup(part, query, t), measured.ratio(part, query, "card", t)
        correction = measured.ratio(part, "card", query, t)
        what = f"T = {t:g}: query and correct by query only"
        claims += [
            above(part, f"T = {t:g}: query only by off", cache, 1.0, paper=papers.CARD_QUERY_ONLY),
            above(part, what, correction, 1.0, paper=papers.CARD_CORRECTION),
            reported(part, f"T = {t:g}: query only, share of both", share, paper=papers.CARD_QUERY_SHARE),
        ]
    # CARD, section 3.4, Figure 6: the hit rate rises with K, up to 97 %, while the speed rises and then falls.
    labels = [f"card K = {width}" for width in evidence.sizes.beam_widths]
    first, last, t = labels[0], labels[-1], 0.0
    rates = [measured.hit_rate(sweep, label, t) for label in labels]
    speeds = {label: measured.throughput(sweep, label, t) or 0.0 for label in labels}
    best = max(speeds, key=lambda label: speeds[label])
    rise, fall = measured.ratio(sweep, best, first, t), measured.ratio(sweep, best, last, t)
    remark = f"best: {best.removeprefix('card ')}"
    ends = first.removeprefix("card "), last.removeprefix("card ")
    highest = max((rate for rate in rates if rate is not None), default=None)
    gain, by_k = share_of(highest, rates[0]), papers.CARD_SPEED_BY_K
    return [
        *claims,
        above(part, f"T = {t:g}: hit rate, the highest by {ends[0]}", gain, 1.0, paper=papers.CARD_HITS),
        at_least(part, f"T = {t:g}: highest hit rate", highest, 0.9, paper=papers.CARD_HITS),
        above(part, f"T = {t:g}: tokens/s, the best K by {ends[0]} (rises)", rise, 1.0, remark, by_k),
        above(part, f"T = {t:g}: tokens/s, the best K by {ends[1]} (falls)", fall, 1.0, remark, by_k),
    ]


def _double(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "double"
    ceiling, remark = evidence.speed_ratios.get(DRAFT_C2_5), _speed_ratio_remark(evidence, DRAFT_C2_5)
    # DOUBLE, Theorem 3: parallel drafting without retrieval cannot be faster than C. Section 4.4: retrieval lifts that.
    pearl, double = (measured.speedup(part, label, 0.0) for label in ("pearl", "double"))
    greedy, sampled = (measured.ratio(name, "double", "pearl", t) for name, t in ((part, 0.0), ("double-sampled", 0.7)))
    claims = [
        claim(part, "T = 0: pearl by off stays below C", pearl, "<", ceiling, remark, papers.DOUBLE_CEILING),
        above(part, "T = 0: double by off exceeds C", double, ceiling, remark, papers.DOUBLE_BEYOND_C),
        at_least(part, "T = 0: double by pearl", greedy, 1.3, paper=papers.DOUBLE_BY_PEARL),
        reported(part, "T = 0.7: double by pearl", sampled, paper=papers.DOUBLE_BY_PEARL_SAMPLED),
    ]
    for name in (name for name in ABLATIONS if name != NO_OWN_TEXT):
        ratio = measured.ratio(part, "double", f"double {name}", 0.0)
        figure = papers.DOUBLE_ABLATIONS.get(name, papers.NONE)
        claims.append(above(part, f"T = 0: double by double with {name}", ratio, 1.0, paper=figure))
    ratio = measured.ratio(part, "double no dynamic tier", f"double {NO_OWN_TEXT}", 0.0)
    claims.append(above(part, "T = 0: the rejected tier, where there is no dynamic one", ratio, 1.0))
    return [*claims, *_double_sweeps(evidence), _double_on_one_core(evidence), _saturation(evidence)]


def _double_sweeps(evidence: MethodsEvidence) -> list[Measurement]:
    """Report what the deepest retrieval and the longest n-gram are worth beside the shallowest and the shortest."""
    sizes = evidence.sizes
    found = []
    for name, letter, values, figure in (
        ("double-depth", "d", sizes.depths, papers.DOUBLE_DEPTH),
        ("double-match-len", "n", sizes.match_lens, papers.NONE),
    ):
        first, *others = (f"double {letter} = {value}" for value in values)
        ratio, remark = evidence.measured.the_best(name, others, first, 0.0)
        found.append(reported("double", f"T = 0: the best {letter} by {letter} = {values[0]}", ratio, remark, figure))
    return found


def _double_on_one_core(evidence: MethodsEvidence) -> Measurement:
    ratio = evidence.measured.ratio("double-one-core", f"double {SERIAL}", "speculative", 0.0)
    what = f"T = 0, on one core: double {SERIAL} by speculative"
    return above("double", what, ratio, 1.0, paper=papers.DOUBLE_ONE_DEVICE)


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
    return claim(part, what, share, "<=", 0.5, "of tokens/s by pearl's", papers.DOUBLE_SATURATION)


def _spacelike(evidence: MethodsEvidence) -> list[Measurement]:
    replay, part = evidence.replay, "spacelike"
    last, near, cold = (None, None, None) if replay is None else (replay.last_third, replay.near, replay.cold)
    return [
        at_least(part, "last third of the requests by off", last, 1.6, paper=papers.TAKEOFF_LATER),
        at_least(part, "near-repeats by off", near, 3.0, paper=papers.TAKEOFF_NEAR),
        at_least(part, "cold start by off", cold, 0.97, paper=papers.TAKEOFF_COLD),
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


def _sources(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "sources"
    claims = []
    for name, figure in papers.TRAINLESS_BY_OFF.items():
        for t in TEMPERATURES:
            label = f"retrieval {name}"
            speedup, tokens = measured.speedup(part, label, t), measured.tokens_per_forward(part, label, t)
            claims.append(above(part, f"T = {t:g}: {name} by off", speedup, 1.0, paper=figure))
            claims.append(reported(part, f"T = {t:g}: tokens per forward, {name}", tokens))
    return claims


def _noise(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "noise"
    found = []
    for name in (SHARED_NOISE, GREEDY_DRAFT, RATIO_RULE):
        label = f"speculative {name}"
        acceptance, tokens = measured.acceptance(part, label, 1.0), measured.tokens_per_forward(part, label, 1.0)
        predicted = None if acceptance is None else expected_tokens(acceptance, CHAIN_LEN)
        what = f"T = 1: tokens per round, {name}"
        found += [
            reported(part, f"T = 1: acceptance, {name}", acceptance, paper=papers.TUTORIAL_ACCEPTANCE),
            reported(part, what, tokens, paper=papers.TUTORIAL_TOKENS),
            reported(part, f"{what}, predicted", predicted, "from the acceptance above", papers.TUTORIAL_TOKENS),
        ]
    return found


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


def _batch(evidence: MethodsEvidence) -> list[Measurement]:
    measured, part, t = evidence.measured, "batch", BATCH_TEMPERATURE
    claims = []
    for count in evidence.sizes.batches:
        speedup = measured.batch_ratio(part, "auto", OFF, t, count)
        claims.append(at_least(part, f"T = {t:g}, {count} at once: auto by off", speedup, 0.98))
    for count in dict.fromkeys((evidence.sizes.batches[0], evidence.sizes.batches[-1])):
        speedup = measured.batch_ratio(part, "pearl", OFF, t, count)
        what = f"T = {t:g}, {count} at once: pearl by off"
        claims.append(reported(part, what, speedup, paper=papers.DOUBLE_BATCH))
    # SAGUARO, Experiment: what is best after a miss depends on the batch. Its fast backup is random tokens, ours is a
    # plain one.
    fallbacks = "batch-fallbacks"
    for count in evidence.sizes.fallback_batches:
        others = [f"saguaro fallback {other}" for other in FALLBACKS[1:]]
        ratio, remark = measured.batch_beside_the_best(fallbacks, "saguaro fallback auto", others, t, count)
        what = f"T = {t:g}, {count} at once: fallback auto by the best other"
        claims.append(at_least(part, what, ratio, 0.95, remark, papers.SAGUARO_FALLBACK))
    most = evidence.sizes.fallback_batches[-1]
    plain = measured.batch_ratio(fallbacks, "saguaro fallback plain", "saguaro fallback draft", t, most)
    what = f"T = {t:g}, {most} at once: fallback plain by draft"
    return [*claims, above(part, what, plain, 1.0, paper=papers.SAGUARO_FALLBACK)]


def _speed_ratio_remark(evidence: MethodsEvidence, draft: str) -> str:
    ratio = evidence.speed_ratios.get(draft)
    return f"C = {ratio:.2f}" if ratio else "C was not measured"


_CLAIMS: dict[str, Callable[[MethodsEvidence], list[Measurement]]] = {
    "methods": _methods,
    "saguaro": _saguaro,
    "card": _card,
    "double": _double,
    "sources": _sources,
    "spacelike": _spacelike,
    "rows": _rows,
    "noise": _noise,
    "auto": _auto,
    "batch": _batch,
}
