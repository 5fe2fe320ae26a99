"""Judges chains by kernels: one copy to the device, a few launches, one copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.acceptance import refusal_bound
from outrider.models.chains import Chain, claims
from outrider.models.cuda.chains import judge_chains
from outrider.models.cuda.rows import CHAIN_WORDS, ROW, ROW_WORDS, TESTED, TESTED_WORDS, UNSETTLED, write_rows


@torch.inference_mode()
def launch(logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
    """Launches the kernels that judge chains, and returns a function that waits for the result.

    Args:
        logits: float32 [rows, vocab].
        chains: At least one.

    Returns:
        A function that returns for each chain what `outrider.models.acceptance.judge` does, or None if the kernels do
        not settle it.
    """
    buffer, sizes = _packed(chains, logits.shape[-1], is_pinned=logits.is_cuda)
    parts = _parts(buffer.to(logits.device, non_blocking=True), sizes)
    rows, tested, shares = parts[0].view(-1, ROW_WORDS), parts[1].view(-1, TESTED_WORDS), parts[2].view(torch.float64)
    found = judge_chains(logits, rows, tested, parts[3], shares, parts[4].view(-1, CHAIN_WORDS))

    def read() -> list[list[int] | None]:
        num_kept, next_tokens = found.tolist()
        return [
            None if UNSETTLED in (kept, token_id) else [*(each.token_id for each in chain.drafted[:kept]), token_id]
            for chain, kept, token_id in zip(chains, num_kept, next_tokens, strict=True)
        ]

    return read


def _packed(chains: Sequence[Chain], vocab_size: int, *, is_pinned: bool) -> tuple[Tensor, list[int]]:
    """Returns what `judge_chains` reads besides the logits, in one int32 buffer of host memory, and the sizes of its
    parts: rows, what is tested there, shares and token ids of claims, and chains."""
    claimed = [claims(drafted, vocab_size) for chain in chains for drafted in chain.drafted]
    num_rows, num_claims = len(claimed) + len(chains), sum(len(token_ids) for token_ids, _ in claimed)
    # If there are no claims, one is made up that is never read: a kernel needs an address.
    num_claims = max(1, num_claims)
    sizes = [num_rows * ROW_WORDS, num_rows * TESTED_WORDS, 2 * num_claims, num_claims, len(chains) * CHAIN_WORDS]
    # Torch reuses pinned memory for later requests, but not before it was copied.
    buffer = torch.zeros(sum(map(_padded, sizes)), dtype=torch.int32, pin_memory=is_pinned)
    numbers = [part.numpy() for part in _parts(buffer, sizes)]
    indices = [(chain, index) for chain in chains for index in range(len(chain.drafted) + 1)]
    params = [chain.sampling for chain, _ in indices]
    write_rows(numbers[0].view(ROW), params, [chain.first_output_index + index for chain, index in indices], vocab_size)

    tested = numbers[1].view(TESTED)
    tested["row"] = [chain.first_row + index for chain, index in indices]
    tested["token_id"] = -1
    # The last row of a chain judges no token.
    places = [place for place, (chain, index) in enumerate(indices) if index < len(chain.drafted)]
    if places:
        judged = [(chain, index, chain.drafted[index]) for chain, index in (indices[place] for place in places)]
        tested["token_id"][places] = [drafted.token_id for _, _, drafted in judged]
        tested["bound"][places] = [
            refusal_bound(drafted, chain.sampling.seed, chain.first_output_index + index)
            for chain, index, drafted in judged
        ]
        counts = np.array([len(token_ids) for token_ids, _ in claimed])
        tested["num_claims"][places] = counts
        tested["first_claim"][places] = np.cumsum(counts) - counts
        numbers[2].view(np.float64)[:] = np.concatenate([shares for _, shares in claimed])
        numbers[3][:] = np.concatenate([token_ids for token_ids, _ in claimed])
    lengths = np.array([len(chain.drafted) for chain in chains])
    of_chains = numbers[4].reshape(len(chains), CHAIN_WORDS)
    of_chains[:, 0] = np.cumsum(lengths + 1) - lengths - 1
    of_chains[:, 1] = lengths
    return buffer, sizes


def _parts(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns the parts of a buffer as views, given their sizes."""
    parts = buffer.split_with_sizes([*map(_padded, sizes)])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _padded(size: int) -> int:
    """Returns how many words a part takes: kernels would be compiled again for a part that is not aligned to 16
    bytes."""
    return -4 * (-size // 4)
