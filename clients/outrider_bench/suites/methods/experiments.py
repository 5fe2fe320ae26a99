"""The experiments of each part: contenders, temperatures, models; in full, and small enough to see them work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from outrider_bench.config import MethodsConfig
from outrider_bench.experiment import DRAFT_UNTRAINED, LLAMA_CPP_CONTENDERS, PLAIN, Experiment, contender
from outrider_bench.suites.methods.prompts import CODE, code
from outrider_bench.suites.methods.replay import NUM_TOPICS, replay_requests
from outrider_bench.suites.methods.settings import ABLATIONS, ALL_METHODS, BATCH_METHODS, CHAIN, TRAINLESS
from outrider_bench.suites.methods.simulated.parts import SIMULATED
from outrider_bench.suites.methods.simulated.sizes import QUICK_SIZES, SimulatedSizes
from outrider_cli.prompts import choose, default_prompts

DRAFT_C5, DRAFT_C2_5 = "demo/draft-c5", "demo/draft-c2.5"
DRAFT_SLOW = "demo/draft-c2.2"
"""A forward takes about twenty times as long as one of the demo pair's."""


@dataclass(frozen=True, slots=True)
class MethodsSizes:
    """Says how much is measured."""

    num_prompts: int = 12
    """Prompts of each experiment: what intervals are estimated from."""
    sweep_prompts: int = 6
    """Prompts of what is drawn only: nothing is claimed about single points of a curve."""
    max_tokens: int = 96
    """Limit for the table of methods, and for the sweep of card's beam: greedy chains are long."""
    ablation_tokens: int = 28
    double_tokens: int = 48
    """Limit for double: its matches depend on how far the text has come."""
    sources_tokens: int = 36
    """Limit for sources that learn from the session alone."""
    other_prompts: int = 8
    """Prompts of each category that is not code, as many as ship."""
    auto_tokens: int = 24
    """Limit for auto outside the table of methods."""
    beam_widths: tuple[int, ...] = (5, 16, 50, 100, 200)  # CARD runs K = 50 and 100 (section 3.1), and sweeps from 5
    # C of SAGUARO sampling, in [0, 1]: 1 leaves the draft's distribution as it is.
    biases: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.0)
    max_rows: tuple[int, ...] = (4, 8, 16, 24, 32)
    # DOUBLE, Fig. 6, sweeps d and chooses 10; its n is 3.
    depths: tuple[int, ...] = (1, 2, 5, 10, 16)
    match_lens: tuple[int, ...] = (1, 2, 3, 4, 6, 10)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Generations at once, the last one the most; DOUBLE, Table 6, has the same."""
    fallback_batches: tuple[int, ...] = (1, 4, 16)
    batch_tokens: int = 30
    prior_prompts: int = 80
    prior_tokens: int = 64
    """Length of each continuation of these prompts."""
    prior_shares: tuple[float, ...] = (1 / 16, 1 / 4)
    """Beside the whole."""
    replay_requests: int = 300
    replay_tokens: int = 20
    replay_cold: int = 20
    """Requests at the beginning that count as a cold start; `off` takes all of them too."""
    replay_off_every: int = 20
    """Afterwards it takes one request in this many."""
    llama_cpp: bool = False
    """True if llama.cpp takes part in the table of methods."""
    simulated: SimulatedSizes = field(default_factory=SimulatedSizes)


QUICK = MethodsSizes(
    num_prompts=1,
    sweep_prompts=1,
    max_tokens=24,
    ablation_tokens=16,
    double_tokens=24,
    sources_tokens=24,
    other_prompts=1,
    auto_tokens=16,
    beam_widths=(5, 25),
    biases=(1.0, 0.5),
    max_rows=(4, 16),
    depths=(1, 10),
    match_lens=(1, 4),
    batches=(1, 4),
    fallback_batches=(4,),
    batch_tokens=12,
    prior_prompts=4,
    prior_tokens=24,
    prior_shares=(1 / 4,),
    replay_requests=12,
    replay_tokens=12,
    replay_cold=4,
    replay_off_every=4,
    simulated=QUICK_SIZES,
)


def sizes_of(config: MethodsConfig) -> MethodsSizes:
    """Choose the sizes that the flags ask for."""
    sizes = QUICK if config.is_quick else MethodsSizes()
    return replace(sizes, llama_cpp=bool(config.llama_server))


TEMPERATURES = (0.0, 0.7, 1.0)
HOT = 1.5
OTHER_CATEGORIES = ("prose", "repetitive")
BUDGET = 16
"""Outcomes that saguaro drafts for, in every setting of it."""
CHAIN_LEN = 8
"""Length of the chains whose tokens are judged one by one."""
WHOLE_CHAINS: dict[str, Any] = {"num_speculative_tokens": CHAIN_LEN, "min_path_probability": 0.0}
"""A chain that ends where it gets improbable would be judged by its good tokens only."""
RATIO: dict[str, Any] = {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"}
SHARING: dict[str, Any] = {"retrieval_params": {"scope": "RETRIEVAL_SCOPE_TENANT", "contribute": True}}
FIXED_METHODS = ("pearl", "best-first", "retrieval")
"""Methods that auto is compared with outside the table of methods."""

QUERY_ONLY = "query only"
SERIAL = "serial"
FALLBACKS = ("auto", "draft", "retrieval", "plain")
"""Reactions of saguaro to a miss, as its setting names them."""
BATCH_TEMPERATURE = 0.7
NO_NOISE, GEOMETRIC, UNIFORM = "no shared noise", "geometric", "uniform"
AS_IN_THE_PAPER = "of the paper"
SHARED_NOISE, GREEDY_DRAFT, RATIO_RULE = "shared noise", "greedy draft", "ratio rule"
LLAMA_CPP_NOTE = (
    "llama.cpp has the same weights in the same number format, its cache in its own (float16), and both cores for each "
    "of its models, which take turns; it draws with noise of its own."
)


def experiments_of(parts: Iterable[str], sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    """List all experiments of these parts, those on the same services together."""
    found = [experiment for part in parts for experiment in _experiments_of_part(part, sizes, repeats)]
    # Services start once for each draft model and place. The sort is stable: within one, parts keep their order.
    services = list(dict.fromkeys(experiment.services for experiment in found))
    return sorted(found, key=lambda experiment: services.index(experiment.services))


def _experiments_of_part(part: str, sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    if part in SIMULATED:
        return SIMULATED[part].experiments(sizes.simulated)
    return _PARTS[part](sizes, repeats)


def _methods(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    note = (
        "No prior and nothing in the ring: double and retrieval have the session's own text. "
        "best-first verifies sub-trees, and one chain where it says so."
    )
    prompts = code(sizes.num_prompts)
    title, everyone = "All methods", ALL_METHODS
    if sizes.llama_cpp:
        everyone = (*everyone, *LLAMA_CPP_CONTENDERS)
        note += f" {LLAMA_CPP_NOTE}"
    return [
        Experiment("methods", "methods", title, everyone, TEMPERATURES, prompts, sizes.max_tokens, repeats, note=note)
    ]


def _saguaro(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    prompts, tokens = code(sizes.num_prompts), sizes.ablation_tokens
    budget = {"budget": BUDGET}
    shapes = {
        shape: {**WHOLE_CHAINS, "saguaro": {"fan_out": f"FAN_OUT_{shape.upper()}", **budget}}
        for shape in (GEOMETRIC, UNIFORM)
    }
    fan_outs = (
        contender("saguaro"),
        contender("saguaro", NO_NOISE, shared_noise=False),
        *(contender("saguaro", shape, **fields) for shape, fields in shapes.items()),
        *(
            contender("saguaro", f"{shape} {AS_IN_THE_PAPER}", shared_noise=False, **fields)
            for shape, fields in shapes.items()
        ),
    )
    note = (
        f"geometric and uniform: chains of {CHAIN_LEN} tokens, however improbable, as in the paper, whose draft model "
        "does not share the target's noise; the others are as always."
    )
    biases = tuple(
        contender("saguaro", f"C = {bias:g}", **RATIO, saguaro={"bias": bias, **budget}) for bias in sizes.biases
    )
    hot = TEMPERATURES[1:]
    slow = (PLAIN, contender("speculative"), contender("saguaro"))
    return [
        Experiment(
            "saguaro-fan-out",
            "saguaro",
            f"Fan-out, with a budget of {BUDGET} outcomes",
            fan_outs,
            hot,
            prompts,
            tokens,
            repeats,
            note=note,
        ),
        Experiment(
            "saguaro-bias",
            "saguaro",
            "SAGUARO sampling under the ratio rule: the probabilities of the likeliest draft tokens times C",
            biases,
            (1.0,),
            code(sizes.sweep_prompts),
            tokens,
            repeats,
        ),
        Experiment(
            "saguaro-c5",
            "saguaro",
            "A draft model at a fifth of the target's cost",
            slow,
            (0.0,),
            prompts,
            tokens,
            repeats,
            DRAFT_C5,
        ),
    ]


def _card(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    prompts, tokens = code(sizes.num_prompts), sizes.ablation_tokens
    correction = (PLAIN, contender("card", QUERY_ONLY, card={"correction": False}), contender("card"))
    widths = tuple(contender("card", f"K = {width}", card={"beam_width": width}) for width in sizes.beam_widths)
    title = "Cache and correction"
    return [
        Experiment("card", "card", title, correction, (0.0, 0.7), prompts, tokens, repeats),
        Experiment("card-width", "card", "Width of the beam", widths, (0.0,), prompts, sizes.max_tokens, repeats),
    ]


def _double(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    prompts, tokens = code(sizes.num_prompts), sizes.double_tokens
    ablations = tuple(contender("double", name, double=switches) for name, switches in ABLATIONS.items())
    everyone = (PLAIN, contender("pearl"), contender("double"), *ablations)
    title = "A draft model at two fifths of the target's cost"
    parts = [
        Experiment(
            f"double-prior-{number}",
            "double",
            f"{share:.0%} of the prior",
            (contender("pearl"), contender("double")),
            (0.0,),
            prompts,
            tokens,
            repeats,
            draft=DRAFT_C2_5,
            prior_share=share,
        )
        for number, share in enumerate(sizes.prior_shares)
    ]
    whole = Experiment("double", "double", title, everyone, (0.0,), prompts, tokens, repeats, DRAFT_C2_5, 1.0)
    # The smaller priors come first: a prior replaces the one before, and the whole one stays for all further ones.
    return [
        *parts,
        whole,
        replace(
            whole,
            name="double-sampled",
            title=f"{title}, sampled",
            contenders=(PLAIN, contender("pearl"), contender("double")),
            temperatures=(0.7,),
        ),
        *_double_sweeps(sizes, whole),
        _double_on_one_core(whole),
    ]


def _double_sweeps(sizes: MethodsSizes, whole: Experiment) -> list[Experiment]:
    """Vary the depth of retrieval (DOUBLE, section 5.3, Fig. 6), and the longest n-gram (n of Algorithm 3)."""
    depths = (contender("double", f"d = {depth}", double={"max_phrase_len": depth}) for depth in sizes.depths)
    lengths = (contender("double", f"n = {count}", double={"max_match_len": count}) for count in sizes.match_lens)
    few = replace(whole, prompts=code(sizes.sweep_prompts))
    return [
        replace(few, name="double-depth", title="Depth of retrieval", contenders=(PLAIN, *depths)),
        replace(few, name="double-match-len", title="Longest n-gram", contenders=(PLAIN, *lengths)),
    ]


def _double_on_one_core(whole: Experiment) -> Experiment:
    """Let models share a device (DOUBLE, section D.8, Table 12): nothing runs beside the target there."""
    contenders = (
        PLAIN,
        contender("speculative"),
        contender("double", SERIAL, double={"serial": True}),
        contender("double"),
    )
    note = "Both services on one core, which they share; the paper's pair has a speed ratio of 3.9."
    title = "Target and draft model on one core"
    return replace(
        whole,
        name="double-one-core",
        title=title,
        contenders=contenders,
        draft=DRAFT_C5,
        shares_core=True,
        note=note,
    )


def _sources(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    note = (
        "Each has its own source alone. rest has the prior of double, the others begin with the prompt and learn from "
        "what the target says."
    )
    return [
        Experiment(
            "sources",
            "sources",
            "Without a draft model: trees from one source each",
            (PLAIN, *(contender("retrieval", name, **fields) for name, fields in TRAINLESS.items())),
            TEMPERATURES,
            code(sizes.num_prompts),
            sizes.sources_tokens,
            # Longer texts rather than a third turn: what a session learns is worth nothing at its beginning.
            min(repeats, 2),
            # On the services of the part before, where the whole prior is loaded.
            draft=DRAFT_C2_5,
            prior_share=1.0,
            note=note,
        )
    ]


def _spacelike(sizes: MethodsSizes, _: int) -> list[Experiment]:
    prompts = replay_requests(sizes.replay_requests, sizes.replay_cold)
    later = range(sizes.replay_cold, len(prompts), sizes.replay_off_every)
    note = (
        f"{len(prompts)} requests, once, in their order, to a service that has said nothing before: {CODE} of up to "
        f"{NUM_TOPICS} held-out modules, greedy, {sizes.replay_tokens} tokens each. A near-repeat is an earlier one "
        "whose first line is gone. off takes the first of them and then one in so many: its time hardly varies."
    )
    return [
        Experiment(
            "spacelike",
            "spacelike",
            "A service that is used",
            (PLAIN, contender("spacelike", **SHARING)),
            (0.0,),
            prompts,
            sizes.replay_tokens,
            # Once: the second time the service would know every answer.
            repeats=1,
            off_at=frozenset([*range(sizes.replay_cold), *later]),
            note=note,
        )
    ]


def _rows(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    trees = (contender("best-first", f"rows = {count}", rows="ROWS_TREE", max_rows=count) for count in sizes.max_rows)
    everyone = (contender("best-first", CHAIN, rows="ROWS_CHAIN"), *trees)
    title = "Rows of a target forward"
    return [
        Experiment("rows", "rows", title, everyone, (1.0,), code(sizes.num_prompts), sizes.ablation_tokens, repeats)
    ]


def _noise(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    everyone = (
        contender("speculative", SHARED_NOISE, shared_noise=True, **WHOLE_CHAINS),
        contender("speculative", GREEDY_DRAFT, shared_noise=False, **WHOLE_CHAINS),
        contender("speculative", RATIO_RULE, **RATIO, **WHOLE_CHAINS),
    )
    title = f"The same draft model, chains of {CHAIN_LEN} tokens"
    return [
        Experiment("noise", "noise", title, everyone, (1.0,), code(sizes.num_prompts), sizes.ablation_tokens, repeats)
    ]


def _auto(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    tokens, prompts = sizes.auto_tokens, code(sizes.num_prompts)
    # The table of methods has the code.
    others = tuple(choose(default_prompts(), OTHER_CATEGORIES, sizes.other_prompts * len(OTHER_CATEGORIES)))
    fixed = (PLAIN, *map(contender, FIXED_METHODS), contender("auto"))
    alone = (PLAIN, contender("auto"))
    return [
        Experiment("auto", "auto", "Beside fixed methods", fixed, TEMPERATURES, others, tokens, repeats),
        Experiment("auto-hot", "auto", f"At temperature {HOT:g}", alone, (HOT,), prompts, tokens, repeats),
        Experiment(
            "auto-untrained",
            "auto",
            "An untrained draft model",
            alone,
            (0.7,),
            prompts,
            tokens,
            repeats,
            DRAFT_UNTRAINED,
        ),
        Experiment(
            "auto-slow",
            "auto",
            "A draft model slowed twenty times",
            alone,
            (0.7,),
            prompts,
            tokens,
            repeats,
            DRAFT_SLOW,
        ),
    ]


def _batch(sizes: MethodsSizes, repeats: int) -> list[Experiment]:
    fallbacks = tuple(
        contender(
            "saguaro",
            f"fallback {name}",
            saguaro={"fallback": f"FALLBACK_{name.upper()}", "budget": BUDGET},
            # The server refuses to fall back on what it was not told to retrieve.
            **({"retrieval": True} if name == "retrieval" else {}),
        )
        for name in FALLBACKS
    )
    note = (
        "So many generations at once, each by the speed of off at the same number: the time is that of all of them, "
        "prefill included."
    )
    every = Experiment(
        "batch",
        "batch",
        "Generations at once",
        BATCH_METHODS,
        (BATCH_TEMPERATURE,),
        code(max(sizes.batches)),
        sizes.batch_tokens,
        repeats,
        note=note,
        concurrencies=sizes.batches,
    )
    return [
        every,
        replace(
            every,
            name="batch-fallbacks",
            title="SAGUARO's reaction to a miss, by generations at once",
            contenders=(PLAIN, *fallbacks),
            concurrencies=sizes.fallback_batches,
        ),
    ]


_PARTS: dict[str, Callable[[MethodsSizes, int], list[Experiment]]] = {
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
