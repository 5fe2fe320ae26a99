"""A pair of models, watched and replayed: how often the draft is right, what forwards cost, what a method would bring.

    python -m outrider_bench.workers.pair --draft demo/draft --draft-dtype float32 --target demo/target-100m

Without a target it can only replay: texts that another worker has watched, through the simulated pair, at given costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.models import pairs
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.filters import tempered_and_filtered
from outrider.models.loading import LoadedModel, load_model
from outrider.models.runner import KVCache, Runner, Segment
from outrider.models.sampling import Sampler
from outrider.models.text import TextCodec
from outrider.verifier.service import limits_of
from outrider.verifier.settings import VerifierSettings
from outrider.wire.speculation import speculation_from_proto
from outrider_bench.costs import Costs
from outrider_bench.drivers import to_proto
from outrider_bench.samples import Request
from outrider_bench.workers.simulated_pair import Simulation
from outrider_bench.workers.worker import Handler, encode, pin, serve

POOL_TOKENS = 16_384
"""Room for a few texts: the services next to this worker have pools of their own."""
NUM_WARM_UPS = 2
"""The first forwards choose kernels and warm caches."""


class Pair:
    """Both models in one process, and what can be observed there."""

    def __init__(self, target: LoadedModel, draft: LoadedModel) -> None:
        self._target, self._draft = target.runner, draft.runner
        self._runners = {"target": target.runner, "draft": draft.runner}
        self._codec, self._vocab_size = TextCodec(target.tokenizer), target.vocab_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def watch(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Generates a text by plain decoding, and compares the draft model with the target at each of its tokens.

        Returns:
            `prompt_token_ids`, `token_ids`, and for each token of the text: `shared_noise` and `own_choice`, 1 if the
            draft model's choice is the target's token, with the target's noise and without; `kept`, the probability
            min(1, q/p) that the token was a kept draft, had it been drawn by the ratio rule; and `overlap`, 1 - TV.
        """
        params = SamplingParams(seed=request["seed"], temperature=request["temperature"])
        prompt = encode(self._codec, request["prompt"])
        token_ids, target_logits = self._decode(prompt, params, request["max_tokens"])
        cache = self._draft.new_cache()
        # The row of a token predicts the next one, so the rows that count begin with the prompt's last one.
        draft_logits = self._draft.forward([Segment(cache, [*prompt, *token_ids[:-1]], len(token_ids))])
        cache.clear()
        each = [params] * len(token_ids)
        ranked = self._sampler.candidates(draft_logits, each, range(len(token_ids)), 1)
        own = draft_logits.argmax(-1).tolist()
        kept, overlap = self._ratio_rule(target_logits, draft_logits, token_ids, params)
        return {
            "prompt_token_ids": prompt,
            "token_ids": token_ids,
            "shared_noise": [int(row[0].token_id == t) for row, t in zip(ranked, token_ids, strict=True)],
            "own_choice": [int(choice == t) for choice, t in zip(own, token_ids, strict=True)],
            "kept": kept,
            "overlap": overlap,
        }

    def measure(self, target_rows: list[int], draft_rows: list[int], context: int, num_turns: int) -> dict[str, Any]:
        """Measures the median times of forwards by their number of rows, in milliseconds of this thread's CPU time.

        All rows of both models take turns. On a shared machine, the wall clock would also count others' work; otherwise
        both clocks agree.
        """
        caches = {name: runner.new_cache() for name, runner in self._runners.items()}
        for name, runner in self._runners.items():
            runner.forward([Segment(caches[name], [i % runner.vocab_size for i in range(context)], 0)])
        rows = {"target": target_rows, "draft": draft_rows}
        times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in rows for count in rows[name]}
        for number in range(num_turns + NUM_WARM_UPS):
            for (name, count), found in times.items():
                taken_ms = _timed(self._runners[name], caches[name], count)
                if number >= NUM_WARM_UPS:
                    found.append(taken_ms)
        for cache in caches.values():
            cache.clear()
        return {
            f"{name}_forward_ms": {count: median(times[name, count]) for count in counts}
            for name, counts in rows.items()
        }

    def _decode(self, prompt: Sequence[int], params: SamplingParams, num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Returns a text of the target, and the logits that its tokens were drawn from: float32 [num_tokens, vocab]."""
        cache, rows, found = self._target.new_cache(), list(prompt), list[torch.Tensor]()
        token_ids: list[int] = []
        for index in range(num_tokens):
            logits = self._target.forward([Segment(cache, rows, 1)])
            rows = self._sampler.draw(logits, [params], [index])
            token_ids += rows
            found.append(logits.clone())
        cache.clear()
        return token_ids, torch.cat(found)

    def _ratio_rule(
        self, target: torch.Tensor, draft: torch.Tensor, token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[list[float], list[float]]:
        """Returns min(1, q/p) of each token, and the sum of min(p, q) (Leviathan et al. 2023, section 3.2)."""
        # Logits may be padded to a round number; the two models need not pad alike.
        target, draft = target[:, : self._vocab_size], draft[:, : self._vocab_size]
        if params.is_greedy:
            same = (target.argmax(-1) == draft.argmax(-1)).float().tolist()
            return same, same
        each = [params] * len(token_ids)
        p, q = (tempered_and_filtered(logits, each).softmax(-1) for logits in (target, draft))
        chosen = torch.tensor(token_ids)[:, None]
        ratio = q.gather(-1, chosen) / p.gather(-1, chosen)
        return ratio.clamp(max=1).flatten().tolist(), torch.minimum(p, q).sum(-1).tolist()


def _timed(runner: Runner, cache: KVCache, num_rows: int) -> float:
    """Returns the CPU time of one forward, in milliseconds; the cache is left unchanged."""
    length, began = cache.length, time.thread_time()
    runner.forward([Segment(cache, [1] * num_rows, num_rows)])
    taken_ms = 1e3 * (time.thread_time() - began)
    cache.truncate(length)
    return taken_ms


class Replay:
    """Replays texts through the simulated pair: real sessions and policies, with a made-up clock."""

    def __init__(self, draft: LoadedModel) -> None:
        self._draft = draft

    @torch.inference_mode()
    def replay(
        self,
        texts: list[dict[str, Any]],
        temperature: float,
        max_tokens: int,
        options: dict[str, Any],
        costs: dict[str, Any],
        policy_ms: float,
    ) -> dict[str, Any]:
        """Runs every text once, after one that warms up and shows the CPU time of the method's policy.

        Args:
            texts: Each with `prompt_token_ids`, `token_ids` and `seed`. They are longer than `max_tokens`, by what may
                be drafted beyond the end.
            temperature: Of the sampling.
            max_tokens: Tokens of a text that are generated.
            options: Method and fields of `SpeculationParams`, as a request has them.
            costs: Fields of `Costs`; `target_ms` by rows.
            policy_ms: Time besides a draft forward that these costs already include. A policy that needs longer for its
                trees, as one with a wide beam does, makes each forward longer by the difference.

        Returns:
            `tokens_per_round`, and `text_ms`, the time of each text.
        """
        params = resolved(options)
        by_rows = {int(rows): ms for rows, ms in costs["target_ms"].items()}
        nominal = Costs(**{**costs, "target_ms": by_rows})
        warm_up = Simulation(self._draft, nominal)
        self._generate(warm_up, texts[0], temperature, max_tokens, params)
        slower_ms = max(0.0, warm_up.policy_ms - policy_ms)
        simulation = Simulation(self._draft, replace(nominal, draft_ms=nominal.draft_ms + slower_ms))
        text_ms, num_rounds = list[float](), 0
        # The first one twice: a server has seen drafts before, and has calibrated their scores.
        for number, text in enumerate([texts[0], *texts]):
            taken_ms, of_text = self._generate(simulation, text, temperature, max_tokens, params)
            if number:
                text_ms.append(taken_ms)
                num_rounds += of_text
        return {"tokens_per_round": len(texts) * max_tokens / num_rounds, "text_ms": text_ms}

    def _generate(
        self,
        simulation: Simulation,
        text: Mapping[str, Any],
        temperature: float,
        max_tokens: int,
        params: SpeculationParams,
    ) -> tuple[float, int]:
        """Returns the simulated time of a text in milliseconds, and its rounds."""
        sampling = SamplingParams(seed=text["seed"], temperature=temperature)
        token_ids = text["token_ids"][: max_tokens + params.num_speculative_tokens + 1]
        time_ms, statistics = simulation.generate(text["prompt_token_ids"], token_ids, sampling, params)
        return time_ms, statistics.num_rounds


def resolved(options: Mapping[str, Any]) -> SpeculationParams:
    """Returns a request as a verifier with its default settings reads it."""
    limits, message = limits_of(VerifierSettings.model_validate({})), to_proto(Request("", 0.0, 0, 1), options)
    return speculation_from_proto(message.speculation, limits.defaults, limits.speculation)


def difference_of(target: Any, draft: Any) -> str:
    """Says in one line how the draft model's tokenizer differs from the target's; empty if it does not.

    Args:
        target: A `LoadedModel`, or anything else with a `tokenizer`, a `tokenizer_hash` and a `vocab_size`.
        draft: The same.
    """
    if target.tokenizer_hash == draft.tokenizer_hash:
        return ""
    ours, theirs = (
        {token_id: one.tokenizer.convert_ids_to_tokens(token_id) for token_id in range(one.vocab_size)}
        for one in (target, draft)
    )
    return pairs.difference_of(ours, theirs) or "all tokens are the same, but not how a text is split into them"


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Target model. Default: none.")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--core", type=int, help="Core to run on. Default: any.")
    flags = parser.parse_args()

    serve(partial(_open, flags))


def _open(flags: argparse.Namespace) -> tuple[dict[str, Any], Mapping[str, Handler]]:
    """Returns the worker's hello and its operations; there are none if the hello says why the models are refused."""
    pin(flags.core)
    try:
        draft = load_model(flags.draft, dtype=flags.draft_dtype, num_tokens=POOL_TOKENS)
        handlers: dict[str, Handler] = {"replay": Replay(draft).replay}
        if flags.target is None:
            return {}, handlers
        # As in the verifier: exact rows take their time, and decide the text.
        target = load_model(flags.target, dtype=flags.dtype, exact="auto", num_tokens=POOL_TOKENS)
    except (UnsupportedModel, OSError) as error:
        return {"refused": f"{flags.target} and {flags.draft}: {str(error).splitlines()[0]}"}, {}
    if difference := difference_of(target, draft):
        return {"refused": pairs.refusal(flags.target, flags.draft, difference)}, {}
    pair = Pair(target, draft)
    models = {"target": target, "draft": draft}
    hello: dict[str, Any] = {role: {"model_id": model.model_id, "dtype": model.dtype} for role, model in models.items()}
    hello["has_chat_template"] = bool(target.tokenizer.chat_template)
    return hello, handlers | {"watch": pair.watch, "measure": pair.measure}


if __name__ == "__main__":
    main()
