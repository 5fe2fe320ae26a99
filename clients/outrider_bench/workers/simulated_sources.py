"""Sources that need no draft model, in simulated time: `python -m outrider_bench.workers.simulated_sources`.

The demo target and held-out code, one session at a time, each with an empty matrix and a pool that knows its prompt
alone. The prior of REST is what the target says to files that it was trained on. The target runs, because the sources
learn from its rows; the times are made up, those of lookups left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from outrider.core.params import Method, Rows, SamplingParams, Source, SpeculationParams
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.retriever import TierSource
from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider.models.loading import LoadedModel, load_model
from outrider_bench.workers.simulated_pair import Costs, Outcome, Simulation, text_of

COSTS = Costs(
    target_ms={1: 20.0, 4: 20.0, 8: 22.0, 16: 30.0, 32: 47.0},
    draft_ms=0.75,
    draft_row_ms=0.035,
    one_way_ms=0.45,
    overhead_ms=1.0,
)
"""As on machine A of RESULTS.md."""
TEMPERATURES = (0.0, 0.7, 1.0)
CHAIN_LEN = 12
NUM_PRIOR_PROMPTS, PRIOR_TOKENS = 80, 64
CONTENDERS: dict[str, tuple[Rows, tuple[Source, ...]]] = {
    "token-recycling": (Rows.TREE, (Source.RECYCLED,)),
    "token-recycling, chains": (Rows.CHAIN, (Source.RECYCLED,)),
    "ngram-pool": (Rows.TREE, (Source.POOL,)),
    "ngram-pool, chains": (Rows.CHAIN, (Source.POOL,)),
    "rest": (Rows.TREE, (Source.PRIOR,)),
    "rest, chains": (Rows.CHAIN, (Source.PRIOR,)),
    "own text, chains": (Rows.CHAIN, (Source.DYNAMIC, Source.REJECTED)),
    "own text, pool and token-recycling": (Rows.TREE, (Source.DYNAMIC, Source.POOL, Source.RECYCLED)),
}
"""Rows and sources of METHOD_RETRIEVAL."""

Texts = list[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class PriorAlone:
    """A datastore that has a prior and nothing else."""

    prior: PriorTable | None
    shared: None = None


def main() -> None:
    """Print a table: tokens per forward, and speed-up over plain decoding, at each temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--num-tokens", type=int, default=96)
    flags = parser.parse_args()
    target, draft = load_model("demo/target", dtype="float32"), load_model("demo/draft", dtype="float32")
    tiers = PriorAlone(prior_of(target))
    prompts = [_token_ids(target, code) for code in code_prompts(load_corpus(), flags.num_prompts)]
    found: dict[str, list[Outcome]] = {name: [] for name in CONTENDERS}
    for temperature in TEMPERATURES:
        sampling = SamplingParams(seed=0, temperature=temperature)
        texts = [(ids, text_of(target, ids, sampling, flags.num_tokens + CHAIN_LEN + 1)) for ids in prompts]
        for name, (rows, sources) in CONTENDERS.items():
            params = SpeculationParams(Method.RETRIEVAL, CHAIN_LEN, 64, 0.2, rows=rows, sources=sources)
            # With copies of an empty datastore, sessions would wait for answers that never come.
            copies: TierSource | None = tiers if Source.PRIOR in sources else None
            found[name].append(outcome_of(Simulation(draft, COSTS, target, copies), texts, sampling, params))
    print("| tokens a forward, speed-up at T = 0 / 0.7 / 1 | | |\n|---|---:|---:|")
    plain = 1e3 / (COSTS.target_ms[1] + COSTS.overhead_ms)
    for name, outcomes in found.items():
        tokens = " / ".join(f"{each.tokens_per_forward:.2f}" for each in outcomes)
        print(f"| {name} | {tokens} | {' / '.join(f'{each.throughput / plain:.2f}' for each in outcomes)} |")


def outcome_of(simulation: Simulation, texts: Texts, sampling: SamplingParams, params: SpeculationParams) -> Outcome:
    """Sum up the generations of all texts, after one that warms up."""
    outcome = Outcome()
    simulation.generate(*texts[0], sampling, params)
    for prompt, text in texts:
        time_ms, statistics = simulation.generate(prompt, text, sampling, params)
        outcome.num_tokens += len(text) - CHAIN_LEN - 1
        outcome.time_ms += time_ms
        outcome.rounds.append(statistics)
    return outcome


def prior_of(target: LoadedModel) -> PriorTable:
    """Build a prior of what the target says, greedily and at temperature 1, to files that it was trained on."""
    learned = load_corpus().train
    # As if these files were held out: that is what prompts are cut from.
    files = Corpus((), learned[:: max(1, len(learned) // NUM_PRIOR_PROMPTS)])
    documents = []
    for code in code_prompts(files, NUM_PRIOR_PROMPTS, shortest=150, longest=300):
        prompt = _token_ids(target, code)
        for seed, temperature in enumerate((0.0, 1.0)):
            sampling = SamplingParams(seed=seed, temperature=temperature)
            documents.append([*prompt, *text_of(target, prompt, sampling, PRIOR_TOKENS)])
    return PriorTable.build(documents)


def _token_ids(model: LoadedModel, text: str) -> list[int]:
    token_ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    return token_ids


if __name__ == "__main__":
    main()
