"""transformers' own `generate` as a baseline of the benchmark, with the same weights.

    python -m outrider_bench.workers.hf --target demo/target-100m --draft demo/draft \\
        --dtype bfloat16 --draft-dtype float32

Three ways: plain, assisted by the draft model (`assistant_model`), and prompt lookup. End-of-sequence tokens are
ordinary tokens in all of them, as they are to our services with `ignore_eos`, so every output has the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from outrider.models.text import TextCodec
from outrider_bench.workers.worker import Handler, Stopwatch, encode, serve_pair

_ASSISTANT_DEFAULTS = {
    "num_assistant_tokens": None,
    "num_assistant_tokens_schedule": None,
    "assistant_confidence_threshold": None,
}
"""None means the default of transformers."""


class _Clock(BaseStreamer):
    """Records when `generate` hands out tokens: the prompt first, then the tokens of each forward."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Takes tokens."""
        if self._is_prompt:
            self._is_prompt = False
        else:
            self._watch.note(value.numel())

    def end(self) -> None:
        """Does nothing."""


class HfBaseline:
    """The two models, and the three ways."""

    def __init__(self, target: Any, draft: Any, codec: TextCodec) -> None:
        self._target, self._draft, self._codec = target, draft, codec
        # Weights come with a generation config: defaults of the sampling and an end-of-sequence token, which the
        # benchmark does not want.
        for model in (target, draft):
            model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def generate(self, request: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one generation, and times it."""
        arguments = dict(options)
        assistant = arguments.pop("assistant", None)
        if assistant is not None:
            # transformers reads these from the assistant's own config, and keeps there what it learns from call to
            # call.
            self._draft.generation_config.update(**(_ASSISTANT_DEFAULTS | assistant))
            arguments["assistant_model"] = self._draft
        if request["temperature"] > 0:
            # top_k: transformers would keep 50 tokens by default.
            arguments |= {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        torch.manual_seed(request["seed"])
        watch = Stopwatch()
        prompt = torch.tensor([encode(self._codec, request["prompt"])], device=self._target.device)
        with _counted_rows(self._target) as rows:
            output = self._target.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["max_tokens"],
                streamer=_Clock(watch),
                **arguments,
            )
        duration_s = watch.elapsed_s()
        num_prompt_tokens = prompt.shape[1]
        token_ids = output[0, num_prompt_tokens:].tolist()
        # Each forward has one row that is no draft; the first also has the prompt.
        num_drafted = sum(rows) - len(rows) - (num_prompt_tokens - 1)
        return {
            "num_prompt_tokens": num_prompt_tokens,
            "token_ids": token_ids,
            "chunks": watch.chunks,
            "duration_s": duration_s,
            "rounds": {
                "num_rounds": len(rows),
                "num_drafted": num_drafted,
                # Each forward brings one token of the target's own; all others were drafts.
                "num_accepted": len(token_ids) - len(rows),
            },
        }


@contextmanager
def _counted_rows(model: Any) -> Iterator[list[int]]:
    """Records the number of rows of each forward."""
    rows: list[int] = []

    def note(_module: Any, _arguments: Any, keywords: Mapping[str, Any]) -> None:
        rows.append(int(keywords["input_ids"].shape[1]))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def main() -> None:
    """Runs the worker."""

    def open_pair(target: Any, draft: Any, tokenizer: Any) -> Mapping[str, Handler]:
        return {"generate": HfBaseline(target, draft, TextCodec(tokenizer)).generate}

    serve_pair(__doc__, open_pair)


if __name__ == "__main__":
    main()
