"""Print how long the target's draw takes a row: ``python -m outrider_bench.workers.sampling``.

Beside it the same draw with noise for the whole vocabulary, in turns. Logits are random, by Zipf's law, as those of
language models roughly are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from outrider.core.params import SamplingParams
from outrider.models.filters import tempered_and_filtered
from outrider.models.sampling import Sampler
from outrider.models.torch.noise import NoiseRows

KINDS = {
    "T = 0.7": {"temperature": 0.7},
    "T = 1": {"temperature": 1.0},
    "T = 1.5": {"temperature": 1.5},
    "T = 0.7, top-k 50": {"temperature": 0.7, "top_k": 50},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 0.7, min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
}
ZIPF_EXPONENT = 1.1


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rows", default="1,9,16", help="rows of a forward")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [int(count) for count in options.rows.split(",")]
    print(f"torch {torch.__version__}, 1 thread, vocabulary {options.vocab_size}; ms a row, medians")
    print(f"{'rows':>20}  " + "".join(f"{count:>16}" for count in rows))
    for kind, fields in KINDS.items():
        pairs = [_milliseconds(count, options.vocab_size, fields, options.repeats) for count in rows]
        print(f"{kind:>20}  " + "".join(f"{few:>8.3f}{f' of {whole:.3f}':>8}" for few, whole in pairs))


def _milliseconds(num_rows: int, vocab_size: int, fields: dict[str, float], repeats: int) -> tuple[float, float]:
    """Time a row's draw, and the draw with noise for all tokens."""
    sampler, noise = Sampler(), NoiseRows(vocab_size, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    params = [SamplingParams(seed=row, **fields) for row in range(num_rows)]  # type: ignore[arg-type]  # as in KINDS
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    logits = -ZIPF_EXPONENT * (1 + ranks).log()
    ways: list[Callable[[list[int]], list[int]]] = [
        lambda indices: sampler.draw(logits, params, indices),
        lambda indices: _draw_whole(logits, params, indices, noise),
    ]
    times: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        indices = [repeat] * num_rows
        drawn = []
        for way, found in zip(ways, times, strict=True):
            began = time.perf_counter()
            drawn.append(way(indices))
            found.append((time.perf_counter() - began) * 1e3 / num_rows)
        if drawn[0] != drawn[1]:
            raise RuntimeError(f"the two ways drew {drawn[0]} and {drawn[1]}")
    few, whole = (median(found[1:]) for found in times)  # the first builds tables
    return few, whole


@torch.inference_mode()
def _draw_whole(
    logits: torch.Tensor, params: Sequence[SamplingParams], indices: Sequence[int], noise: NoiseRows
) -> list[int]:
    scores = tempered_and_filtered(logits, params)
    for row, one, index in zip(scores, params, indices, strict=True):
        row += noise.row(one.seed, index)
    tokens: list[int] = scores.numpy().argmax(-1).tolist()
    return tokens


if __name__ == "__main__":
    main()
