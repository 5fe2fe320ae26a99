"""The bare loop as a baseline of the benchmark, what one forward costs, and how often the draft model is right.

    python -m outrider_bench.workers.bare --target demo/target-100m --draft demo/draft \\
        --dtype bfloat16 --draft-dtype float32

The same runner and sampler as the verifier's, in one thread: a forward of one row, a draw, the next forward. No
services, no session, no stream. What the verifier takes longer with speculation off is the price of being a service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.models.backend import backend_of
from outrider.models.runner import Runner, Segment
from outrider.models.sampling import Sampler
from outrider.models.text import TextCodec
from outrider.models.timing import measure_forward
from outrider_bench.workers.worker import Handler, Stopwatch, encode, serve_pair


class BareBaseline:
    """The two runners, and the loop."""

    def __init__(self, target: Runner, draft: Runner, codec: TextCodec) -> None:
        self._target, self._draft, self._codec = target, draft, codec
        self._sampler = Sampler()

    @torch.inference_mode()
    def generate(self, request: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one generation, and times it."""
        watch = Stopwatch()
        params = SamplingParams(seed=request["seed"], temperature=request["temperature"])
        prompt = encode(self._codec, request["prompt"])
        cache = self._target.new_cache()
        rows, token_ids = prompt, list[int]()
        while len(token_ids) < request["max_tokens"]:
            logits = self._target.forward([Segment(cache, rows, 1)])
            rows = self._sampler.draw(logits, [params], [len(token_ids)])
            token_ids += rows
            watch.note(1)
        cache.clear()
        return {
            "num_prompt_tokens": len(prompt),
            "token_ids": token_ids,
            "chunks": watch.chunks,
            "duration_s": watch.elapsed_s(),
            "rounds": {"num_rounds": len(token_ids)},
        }

    @torch.inference_mode()
    def ranks(self, request: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
        """Ranks each token of the target's text as the draft model does: 0 = its first choice, -1 = none of the first
        `num_ranks`. The draft model gets all earlier tokens, and at a temperature ranks with the target's noise, as a
        speculator does on the right path."""
        token_ids = self.generate(request, {})["token_ids"]
        params = SamplingParams(seed=request["seed"], temperature=request["temperature"])
        # The row of a token ranks the next one, so the last token of the text needs none. The rows that count, one for
        # each token, begin with the prompt's last one. One forward has them all.
        rows = [*encode(self._codec, request["prompt"]), *token_ids[:-1]]
        cache = self._draft.new_cache()
        logits, indices = self._draft.forward([Segment(cache, rows, len(token_ids))]), range(len(token_ids))
        cache.clear()
        found = self._sampler.candidates(logits, [params] * len(token_ids), indices, num_ranks)
        ranked = [[candidate.token_id for candidate in candidates] for candidates in found]
        return {
            "ranks": [
                choices.index(token_id) if token_id in choices else -1
                for token_id, choices in zip(token_ids, ranked, strict=True)
            ]
        }

    def measure(self, target_rows: list[int], draft_rows: list[int], context: int) -> dict[str, Any]:
        """Measures the median times of forwards by their number of rows, in milliseconds."""
        return {
            "target_forward_ms": measure_forward(self._target, target_rows, context),
            "draft_forward_ms": measure_forward(self._draft, draft_rows, context),
        }


def main() -> None:
    """Runs the worker."""

    def open_pair(target: Any, draft: Any, tokenizer: Any) -> Mapping[str, Handler]:
        runners = [backend_of(model.device).make_runner(model) for model in (target, draft)]
        baseline = BareBaseline(runners[0], runners[1], TextCodec(tokenizer))
        return {"generate": baseline.generate, "measure": baseline.measure, "ranks": baseline.ranks}

    serve_pair(__doc__, open_pair)


if __name__ == "__main__":
    main()
