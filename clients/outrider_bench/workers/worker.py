"""The protocol of worker processes: one JSON object a line, requests on stdin, answers on stdout.

The first line from a worker says that it is ready, and what it has loaded. It ends when its stdin is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from outrider_cli.prompts import Input

if TYPE_CHECKING:
    from outrider.models.text import TextCodec

Handler = Callable[..., dict[str, Any]]
OpenPair = Callable[[Any, Any, Any], Mapping[str, Handler]]


def pin(core: int | None) -> None:
    """Keeps this process on one core, and torch on one thread. Must be called before any other work with torch."""
    import torch

    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def serve(load: Callable[[], tuple[dict[str, Any], Mapping[str, Handler]]]) -> None:
    """Loads, says hello, and answers until stdin ends. A request that raises is answered with its error."""
    # Libraries may print to stdout at any time; the protocol writes to its private copy of the descriptor.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr
    hello, handlers = load()
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = handlers[message.pop("operation")](**message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers)


def serve_pair(description: str | None, open_pair: OpenPair) -> None:
    """Runs a worker that holds a target and a draft model, named by its flags.

    Args:
        description: Of the program, for --help.
        open_pair: Makes the handlers from the target, the draft model and the target's tokenizer.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "dtype", "draft-dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--core", type=int, help="Core to run on. Default: any.")
    flags = parser.parse_args()

    def load() -> tuple[dict[str, Any], Mapping[str, Handler]]:
        from outrider.models.loading import build_hf_model

        pin(flags.core)
        target, tokenizer = build_hf_model(flags.target, flags.dtype)
        draft, _ = build_hf_model(flags.draft, flags.draft_dtype)
        # Described first, because a runner repacks the weights.
        hello = {
            "target": describe_model(target, flags.target),
            "draft": describe_model(draft, flags.draft),
            "has_chat_template": bool(tokenizer.chat_template),
        }
        return hello, open_pair(target, draft, tokenizer)

    serve(load)


def encode(codec: TextCodec, prompt: Input) -> list[int]:
    """Returns the token ids of a request's prompt: those that the verifier makes of it."""
    from outrider.models.text import Chat

    return codec.encode(prompt) if isinstance(prompt, str) else codec.encode_chat(Chat(prompt))


class Stopwatch:
    """Records when tokens came, in seconds since its creation."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.chunks: list[tuple[float, int]] = []

    def note(self, num_tokens: int) -> None:
        """Records that `num_tokens` tokens have just come."""
        self.chunks.append((self.elapsed_s(), num_tokens))

    def elapsed_s(self) -> float:
        """Returns the seconds since the beginning."""
        return time.perf_counter() - self._started


def describe_model(model: Any, model_id: str) -> dict[str, Any]:
    """Describes a model for the benchmark, above all whether its cost is inflated."""
    # Imported here: this module also serves processes without a model, and these imports bring torch.
    from outrider.models.checkpoint import DEMO_PREFIX
    from outrider.models.demo.names import parse_inflation
    from outrider.models.loading import build_hf_model

    base, inflation = parse_inflation(model_id.removeprefix(DEMO_PREFIX))
    is_inflated = model_id.startswith(DEMO_PREFIX) and inflation is not None
    trained = build_hf_model(DEMO_PREFIX + base)[0] if is_inflated else model
    return {
        "model_id": model_id,
        "num_parameters": model.num_parameters(),
        "num_trained_parameters": trained.num_parameters(),
        "inflated": is_inflated,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_layers": getattr(model.config, "num_hidden_layers", None),
        "hidden_size": getattr(model.config, "hidden_size", None),
        "intermediate_size": getattr(model.config, "intermediate_size", None),
    }
