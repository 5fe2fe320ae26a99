"""The worker of the GPU suite: makes the pair, decodes with it as other programs do, and measures single parts.

    python -m outrider_bench.workers.gpu --device cuda:0

One process for each purpose, since memory of a GPU is free again only when the process that had it has ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from outrider.core.params import SamplingParams
from outrider.models.cuda.inputs import LOOP_LENS
from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.widen import QWEN3_0_6B, QWEN3_8B, Size, randomise, widen
from outrider.models.loading import CannotLoadModel, build_hf_model, check_device, load_model
from outrider.models.sampling import Sampler
from outrider.models.timing import measure_forward, measure_products, measure_sessions, measure_steps
from outrider_bench.workers.hf import HfBaseline
from outrider_bench.workers.memory import NUM_BYTES, bytes_per_token, num_parameters
from outrider_bench.workers.plain_loop import PlainLoop
from outrider_bench.workers.worker import Handler, serve

SIZES: dict[str, tuple[tuple[Size, Size], torch.dtype]] = {
    "8b": ((QWEN3_8B, QWEN3_0_6B), torch.bfloat16),
    # Just wider than the demo pair.
    "tiny": (
        (
            Size(512, 704, 6, 8, 4, 64, 2304, is_tied=False, max_positions=2048),
            Size(256, 448, 2, 8, 4, 64, 2304, is_tied=True, max_positions=2048),
        ),
        torch.float32,
    ),
}
"""Shapes of target and draft, and their number format."""
ROLES = ("target", "draft")
COMPLETE = "complete.json"
"""The file that is written last: a folder without it is incomplete."""
FORMAT = 1
"""Increased when the generated weights change."""
SHORT = 64
"""Context, in tokens, to which a long one is compared: the difference is the cost of reading keys and values."""


class GpuWorker:
    """Answers the requests of the suite, on one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._hf: HfBaseline | None = None
        self._loop: PlainLoop | None = None
        self._model: Any = None
        self._max_len = 0
        self._tokenizer: Any = None

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the requests that it answers, by name."""
        return {
            "make": self.make,
            "prompts": self.prompts,
            "open": self.open,
            "generate": self.generate,
            "measure": self.measure,
        }

    def make(self, size: str, weights: str, folder: str) -> dict[str, Any]:
        """Makes the two checkpoints unless they exist.

        Args:
            size: A key of SIZES.
            weights: `widened` or `random`.
            folder: Takes a folder for each model.

        Returns:
            The folders by role, the seconds that it took, and the memory of the pair.
        """
        shapes, dtype = SIZES[size]
        started = time.perf_counter()
        folders = {}
        for role, shape in zip(ROLES, shapes, strict=True):
            path = Path(folder) / f"{weights}-{size}-{role}-{FORMAT}"
            folders[role] = str(path)
            if (path / COMPLETE).is_file():
                continue
            if weights == "random":
                randomise(shape, DEMO_FOLDER / role, path, device=self._device, dtype=dtype)
            else:
                model: Any = build_hf_model(f"demo/{role}", "float32", device=self._device)[0]
                widen(model, DEMO_FOLDER / role, shape, path, dtype=dtype)
            (path / COMPLETE).write_text(json.dumps({"shape": repr(shape)}), encoding="utf-8")
        return {
            "folders": folders,
            "took_s": time.perf_counter() - started,
            "dtype": str(dtype).removeprefix("torch."),
            "weights_bytes": sum(dtype.itemsize * num_parameters(shape) for shape in shapes),
            "bytes_per_token": sum(bytes_per_token(shape) * dtype.itemsize // NUM_BYTES for shape in shapes),
        }

    def prompts(self, folder: str, texts: Sequence[str], lengths: Sequence[int], count: int) -> dict[str, Any]:
        """Makes prompts of about these lengths, each with a different beginning and a different end.

        Args:
            folder: The model's, for its tokenizer.
            texts: They are concatenated in rotation.
            lengths: In tokens.
            count: Prompts of each length.
        """
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = [tokenizer(text)["input_ids"] for text in texts]
        found: dict[str, list[str]] = {}
        for length in lengths:
            found[str(length)] = []
            for index in range(count):
                first = index % len(tokens)
                # Rotated, and a few tokens shorter, so that neither beginning nor end equals another prompt's.
                ids = [*tokens[first]][: len(tokens[first]) - 7 * (index // len(tokens))]
                behind = 1
                while len(ids) < length:
                    ids = [*tokens[(first - behind) % len(tokens)], *ids]
                    behind += 1
                found[str(length)].append(str(tokenizer.decode(ids[-length:])))
        return {"prompts": found}

    def open(self, target: str, draft: str, max_len: int) -> dict[str, Any]:
        """Loads the pair for other programs' ways; `max_len`: maximum tokens of a prompt and its text together."""
        model, self._tokenizer = build_hf_model(target, device=self._device)
        assistant, _ = build_hf_model(draft, device=self._device)
        self._hf = HfBaseline(model, assistant, self._tokenizer)
        self._model, self._max_len = model, max_len
        return {}

    def generate(self, request: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one generation: by the plain loop if `graph` is in the options, otherwise as `HfBaseline` does."""
        assert self._hf is not None
        if options.get("cache_implementation") == "static":
            # One length for all texts, because transformers compiles the model again for a longer one.
            options = {**options, "max_cache_len": self._max_len}
        if not options.get("graph"):
            return self._hf.generate(request, options)
        # Made on request: a graph that cannot be captured here must not affect the other ways.
        if self._loop is None:
            self._loop = PlainLoop(self._model, self._max_len)
        token_ids = self._tokenizer(request["prompt"])["input_ids"]
        started = time.perf_counter()
        found = self._loop.generate(token_ids, request["max_tokens"])
        duration_s = time.perf_counter() - started
        step_s = found["decode_s"] / max(1, len(found["token_ids"]) - 1)
        first_s = duration_s - found["decode_s"]
        return {
            "num_prompt_tokens": len(token_ids),
            "token_ids": found["token_ids"],
            # All steps are alike.
            "chunks": [(first_s + place * step_s, 1) for place in range(len(found["token_ids"]))],
            "duration_s": duration_s,
            "rounds": {"num_rounds": len(found["token_ids"])},
        }

    def measure(
        self,
        model: str,
        dtype: str,
        rows: Sequence[int],
        sessions: Sequence[int],
        context: int,
        num_repeats: int,
        is_draft: bool,
    ) -> dict[str, Any]:
        """Measures forwards by rows, the products in them, sessions by number and context, draws, and loops of steps.

        Args:
            model: Its folder.
            dtype: Its number format.
            rows: Numbers of rows of a forward.
            sessions: Numbers of sessions, each with a row of a forward.
            context: Tokens that are in the caches already.
            num_repeats: How often each is measured; results are medians.
            is_draft: True if the model makes several steps at once in services.

        Returns:
            Milliseconds by number, and rates in GB/s.
        """
        room = max(sessions) * (context + 64) + max(rows) + 64
        runner = load_model(model, dtype=dtype, device=self._device, num_tokens=-(-room // 64) * 64).runner
        forwards = measure_forward(runner, rows, context, num_repeats=num_repeats)
        products = measure_products(runner, rows, num_repeats=num_repeats)
        num_bytes = runner.dtype.itemsize * self._num_product_weights(model)
        short, long = (
            measure_sessions(runner, sessions, length, num_repeats=num_repeats) for length in (SHORT, context)
        )
        more_bytes = runner.cache_shape.bytes_per_slot * (context - SHORT)
        length = LOOP_LENS[-1]
        steps = measure_steps(runner, sessions, context, length, num_repeats=num_repeats) if is_draft else {}
        return {
            "context": context,
            "forward_ms": forwards,
            "products_ms": products,
            "products_gb_per_s": {count: num_bytes / ms / 1e6 for count, ms in products.items()},
            "sessions_ms": long,
            "kv_gb_per_s": {
                count: count * more_bytes / (ms - short[count]) / 1e6 for count, ms in long.items() if ms > short[count]
            },
            "draw_us": self._draws(runner.vocab_size, rows, num_repeats),
            "steps_ms": steps,
        }

    def _num_product_weights(self, folder: str) -> int:
        """Counts the weights of the products of all layers."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"] + config["num_key_value_heads"]
        attention = 2 * config["hidden_size"] * config["head_dim"] * heads
        neurons = 3 * config["hidden_size"] * config["intermediate_size"]
        return int(config["num_hidden_layers"] * (attention + neurons))

    @torch.inference_mode()
    def _draws(self, vocab_size: int, rows: Sequence[int], num_repeats: int) -> dict[str, dict[int, float]]:
        """Measures draws by temperature and rows, in microseconds, with the copy of their results."""
        generator = torch.Generator(self._device).manual_seed(0)
        found: dict[str, dict[int, float]] = {}
        sampler = Sampler()
        for temperature in (0.0, 0.7):
            times: dict[int, list[float]] = {}
            params = SamplingParams(temperature=temperature, seed=1)
            for count in rows:
                logits = 3 * torch.randn(count, vocab_size, device=self._device, generator=generator)
                for repeat in range(num_repeats + 2):
                    started = time.perf_counter()
                    # Indices that were not drawn before, because noise is cached.
                    sampler.draw(logits, [params] * count, range(repeat * count, (repeat + 1) * count))
                    if repeat >= 2:
                        times.setdefault(count, []).append(1e6 * (time.perf_counter() - started))
            found[f"{temperature:g}"] = {count: median(samples) for count, samples in times.items()}
        return found


def main() -> None:
    """Runs the worker. A missing device is reported in its hello."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    device = parser.parse_args().device

    def load() -> tuple[dict[str, Any], Mapping[str, Handler]]:
        try:
            check_device(device)
        except CannotLoadModel as error:
            return {"refusal": str(error)}, {}
        torch.set_num_threads(1)
        is_cuda = torch.device(device).type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else "CPU"
        memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if is_cuda else None
        return {"device": name, "memory_gib": memory_gib}, GpuWorker(device).handlers()

    serve(load)


if __name__ == "__main__":
    main()
