"""A process that generates in simulated time: the papers' suite asks it for turns of a contender.

    python -m outrider_bench.workers.simulated --target demo/target --draft demo/draft [--core N]

It reads what a contender asks for as a verifier would: fields that are not set have a server's defaults, and what a
server refuses is refused here. Each contender of an experiment has a simulation of its own at each temperature, with a
warm-up before its first turn, so that what it has measured and learnt is its own.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.core.acceptance import decides_by_ratio
from outrider.core.methods import AUTO
from outrider.core.params import SamplingParams, Source
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.retriever import TierSource
from outrider.core.retrieval.ring import TokenRing
from outrider.core.session import Verdict
from outrider.core.speculation import SpeculationLimits, SpeculationParams
from outrider.core.statistics import Statistics
from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider.models.loading import LoadedModel, load_model
from outrider.verifier.settings import VerifierSettings
from outrider.wire.speculation import speculation_from_proto
from outrider_bench.costs import Costs
from outrider_bench.drivers import to_proto
from outrider_bench.running import WARM_UP_PROMPT, WARM_UP_SEED
from outrider_bench.samples import Request
from outrider_bench.workers.simulated_pair import Simulation, text_of
from outrider_bench.workers.worker import Handler, pin, serve

WARM_UP_TOKENS = 32
NUM_PRIOR_PROMPTS, PRIOR_TOKENS = 80, 64
"""Size of the prior: two texts for each prompt."""
RING_CAPACITY = 1 << 18
"""Tokens that a service remembers: more than a replay has."""
_DEFAULTS = SpeculationParams(
    AUTO,
    VerifierSettings.model_fields["num_speculative_tokens"].default,
    VerifierSettings.model_fields["lookahead"].default,
    VerifierSettings.model_fields["min_path_probability"].default,
)
"""Those of a verifier that was started without flags."""


@dataclass(frozen=True, slots=True)
class PriorAlone:
    """A datastore with a prior and nothing else."""

    prior: PriorTable | None
    shared: None = None


class SimulatedPair:
    """The pair of models, the target's texts, and a simulation of each contender."""

    def __init__(self, target: LoadedModel, draft: LoadedModel) -> None:
        self._target, self._draft = target, draft
        self._texts: dict[Request, list[int]] = {}
        self._contenders: dict[str, _Contender] = {}
        self._prior: PriorTable | None = None

    def take_turn(
        self,
        experiment: str,
        options: dict[str, Any],
        costs: dict[str, Any],
        requests: Sequence[dict[str, Any]],
        num_at_once: int,
        has_prior: bool = False,
    ) -> dict[str, Any]:
        """Runs the generations of a turn.

        Args:
            experiment: Name of the experiment: a contender knows nothing of what it learnt, or said, in another one.
            options: The contender's; see `drivers.to_proto`.
            costs: See `Costs.to_json`.
            requests: The fields of one `Request` each, all with the same temperature.
            num_at_once: Generations that run at the same time.
            has_prior: True if both sides get a copy of the prior, see `prior_of`.

        Returns:
            The simulated total time in milliseconds, and each generation as `samples` reads it.

        Raises:
            InvalidParameter: A server would refuse the contender's request.
        """
        asked = [Request(**each) for each in requests]
        key = json.dumps([experiment, options, costs, asked[0].temperature, num_at_once, has_prior], sort_keys=True)
        if key not in self._contenders:
            message = to_proto(asked[0], options).speculation
            params = speculation_from_proto(message, _DEFAULTS, SpeculationLimits())
            if has_prior and self._prior is None:
                self._prior = prior_of(self._target)
            tiers = PriorAlone(self._prior) if has_prior else None
            simulation = _Contender(self, params, self._draft, Costs.from_json(costs), self._target, tiers)
            # Its own timings and calibrations begin with a generation that is not measured.
            simulation.run([Request(WARM_UP_PROMPT, asked[0].temperature, WARM_UP_SEED, WARM_UP_TOKENS)], 1)
            self._contenders[key] = simulation
        return self._contenders[key].run(asked, num_at_once)

    def prompt_and_text(self, request: Request, params: SpeculationParams) -> tuple[list[int], list[int]]:
        """Returns the tokens of a prompt, and the target's text, extended by what is drafted beyond the end."""
        num_tokens = request.max_tokens + params.num_speculative_tokens + 1
        prompt = self._target.tokenizer.encode(request.prompt, add_special_tokens=False)
        known, sampling = replace(request, max_tokens=0), _sampling_of(request)
        if decides_by_ratio(sampling, params):
            return prompt, [0] * num_tokens  # only its length counts: the drafts decide the text
        if len(self._texts.get(known, ())) < num_tokens:
            self._texts[known] = text_of(self._target, prompt, sampling, num_tokens)
        return prompt, self._texts[known][:num_tokens]


class _Contender:
    """Simulates a contender, and records what the verdicts of each generation tell besides its statistics."""

    def __init__(
        self,
        pair: SimulatedPair,
        params: SpeculationParams,
        draft: LoadedModel,
        costs: Costs,
        target: LoadedModel,
        tiers: TierSource | None,
    ) -> None:
        self._pair, self._params = pair, params
        self._told: dict[int, _Told] = defaultdict(_Told)
        # Each contender has its own service, so it knows only its own earlier output.
        ring = TokenRing(RING_CAPACITY) if params.method.needs_datastore else None
        self._simulation = Simulation(draft, costs, target, tiers, on_verdict=self._note, ring=ring)

    def run(self, requests: Sequence[Request], num_at_once: int) -> dict[str, Any]:
        """See `SimulatedPair.take_turn`."""
        self._told.clear()
        texts = [self._pair.prompt_and_text(request, self._params) for request in requests]
        work = [(*text, _sampling_of(request)) for text, request in zip(texts, requests, strict=True)]
        time_ms, found = self._simulation.run(work, self._params, num_at_once)
        # Generations begin in order, and are numbered then.
        told = [each for _, each in sorted(self._told.items())]
        generations = [
            {
                "num_prompt_tokens": len(prompt),
                "token_ids": each.token_ids,
                "chunks": [],
                # Generations that run together each have the time of their own rounds.
                "duration_s": (time_ms if num_at_once == 1 else sum(one.round_ms for one in own.round_times)) / 1e3,
                "rounds": _rounds(own, each.num_judged),
            }
            for (prompt, _), own, each in zip(texts, found, told, strict=True)
        ]
        return {"time_ms": time_ms, "generations": generations}

    def _note(self, session_id: str, verdict: Verdict) -> None:
        self._told[int(session_id)].note(verdict)


@dataclass(slots=True)
class _Told:
    """What the verdicts of one generation tell."""

    token_ids: list[int] = field(default_factory=list)
    num_judged: int = 0

    def note(self, verdict: Verdict) -> None:
        """Adds a round."""
        kept = sum(source is not Source.TARGET for source in verdict.sources)
        # The kept ones, and the one that the target's own token replaced.
        self.num_judged += min(kept + (kept < len(verdict.sources)), verdict.num_drafted)
        self.token_ids += verdict.token_ids


def _sampling_of(request: Request) -> SamplingParams:
    return SamplingParams(seed=request.seed, temperature=request.temperature)


def _rounds(statistics: Statistics, num_judged: int) -> dict[str, Any]:
    """Returns the fields of `samples.Rounds`."""
    return {
        "num_rounds": statistics.num_rounds,
        "num_drafted": statistics.num_drafted_tokens,
        "num_accepted": statistics.num_accepted_tokens,
        "num_empty": statistics.num_empty_rounds,
        "num_hits": statistics.num_hits,
        "num_ready_hits": statistics.num_ready_hits,
        "num_draft_forwards": statistics.num_draft_forwards,
        "num_draft_rows": statistics.num_draft_rows,
        "num_withheld_nodes": statistics.num_withheld_nodes,
        "num_tail_tokens": statistics.num_tail_tokens,
        "num_phrase_tokens": statistics.num_phrase_tokens,
        "num_judged": num_judged,
        "accepted_by_source": {source.name.lower(): count for source, count in statistics.accepted_by_source.items()},
    }


def prior_of(target: LoadedModel) -> PriorTable:
    """Builds a prior of the target's continuations, greedy and at temperature 1, of files that it was trained on.
    Measured prompts come from other files."""
    learned = load_corpus().train
    # As if these files were held out, because prompts are cut from held-out files.
    files = Corpus((), learned[:: max(1, len(learned) // NUM_PRIOR_PROMPTS)])
    documents = []
    for code in code_prompts(files, NUM_PRIOR_PROMPTS, shortest=150, longest=300):
        prompt: list[int] = target.tokenizer.encode(code, add_special_tokens=False)
        for seed, temperature in enumerate((0.0, 1.0)):
            sampling = SamplingParams(seed=seed, temperature=temperature)
            documents.append([*prompt, *text_of(target, prompt, sampling, PRIOR_TOKENS)])
    return PriorTable.build(documents)


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--core", type=int, help="Core to run on. Default: any.")
    flags = parser.parse_args()

    def load() -> tuple[dict[str, Any], Mapping[str, Handler]]:
        pin(flags.core)
        target, draft = (load_model(name, dtype="float32") for name in (flags.target, flags.draft))
        pair = SimulatedPair(target, draft)
        return {"target": flags.target, "draft": flags.draft}, {"take_turn": pair.take_turn}

    serve(load)


if __name__ == "__main__":
    main()
