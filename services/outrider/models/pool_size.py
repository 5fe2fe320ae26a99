"""The size of a pool: tokens whose keys and values fit into the memory that is free."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from transformers import PreTrainedModel

from outrider.models.kv_cache import TILE, CacheShape

log = structlog.get_logger(__name__)

MEMORY_SHARE = 0.5
"""Share of the free memory that the pool takes at most by default: a CPU's services share memory with others."""
DEVICE_MEMORY_SHARE = 0.85
"""The same on an accelerator, whose memory is for this alone; the rest is for activations."""
OWN_BYTES = 3 * 2**29
"""Most memory of a GPU that a process takes besides its tensors: for its context, its libraries and its kernels."""


class NoMemory(Exception):
    """A GPU has no memory for the weights of a model."""


class NoRoom(Exception):
    """A GPU has no memory for a pool. The message names the flag."""


class Beside(NamedTuple):
    """Describes the pool of another model that will be made on the same GPU. Its weights are there already."""

    bytes_per_slot: int
    num_tokens: int
    """Tokens that were configured; 0 means as many as the first pool has."""


def num_blocks(
    shape: CacheShape, context_len: int, num_tokens: int, block_size: int, num_sessions: int, beside: Beside | None
) -> int:
    """Returns the blocks of the pool. Raises NoRoom if a GPU has no memory for them.

    Args:
        shape: A slot of the pool.
        context_len: Most slots of a session.
        num_tokens: Tokens that must fit; 0 means `default_num_tokens`.
        block_size: Slots of a block.
        num_sessions: Most sessions at a time.
        beside: Another pool that must have room on the same GPU.
    """
    if shape.device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(shape.device)
        warn_of_others(shape.device, total_bytes - free_bytes - torch.cuda.memory_reserved(shape.device))
        room = room_on_gpu(shape, free_bytes, beside, num_tokens)
        check_pool_memory(shape, num_tokens or context_len + TILE, room, is_chosen=bool(num_tokens))
    else:
        room = int(MEMORY_SHARE * free_memory()) // shape.bytes_per_slot
    num_tokens = num_tokens or default_num_tokens(context_len, num_sessions, room)
    # Rounded down: a last block that is not full would exceed the memory that was asked for.
    return num_tokens // block_size if block_size > 0 else 0


def check_weights_memory(model: PreTrainedModel, device: str) -> None:
    """Raises NoMemory if a GPU has no memory for a model's weights, which are not on it yet."""
    tensors = [*model.parameters(), *model.buffers()]
    needed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if needed_bytes > free_bytes:
        needed, missing, free, total = (
            size / 2**30 for size in (needed_bytes, needed_bytes - free_bytes, free_bytes, total_bytes)
        )
        raise NoMemory(
            f"its weights take {needed:.2f} GiB of {device}, and {missing:.2f} GiB of that are missing: of its "
            f"{total:.2f} GiB, {free:.2f} GiB are free"
        )


def warn_of_others(device: torch.device, used_bytes: int) -> None:
    """Warns if other processes hold memory of a GPU: they share its time with this one, which slows all of them.

    Args:
        device: The GPU.
        used_bytes: Used memory of the GPU, without what this process has reserved for tensors.
    """
    if used_bytes > OWN_BYTES:
        log.warning(
            "gpu.shared",
            device=str(device),
            others_gib=round(used_bytes / 2**30, 1),
            advice="processes take turns on a GPU: --drafter in-process makes target and draft model one, and NVIDIA's "
            "MPS lets several run side by side; --kv-cache-tokens divides the memory",
        )


def room_on_gpu(shape: CacheShape, free_bytes: int, beside: Beside | None = None, num_chosen: int = 0) -> int:
    """Returns the tokens that a GPU has room for in a pool. If two models share it, both pools have room for as many
    tokens: a session holds about as many in each.

    Args:
        shape: A slot of the pool.
        free_bytes: Memory that is free, in bytes.
        beside: Another pool, which will be made after this one.
        num_chosen: Tokens that were configured for this pool: the other one gets what is left. 0 means that none were.
    """
    usable = int(DEVICE_MEMORY_SHARE * free_bytes)
    if beside is not None and beside.num_tokens:
        usable = max(0, usable - beside.num_tokens * beside.bytes_per_slot)
    elif beside is not None and not num_chosen:
        return usable // (shape.bytes_per_slot + beside.bytes_per_slot)
    return usable // shape.bytes_per_slot


def check_pool_memory(shape: CacheShape, num_tokens: int, room: int, *, is_chosen: bool) -> None:
    """Raises NoRoom if the pool of an accelerator does not fit into its memory.

    Args:
        shape: A slot of the pool.
        num_tokens: Tokens that must fit.
        room: Tokens that there is room for (`room_on_gpu`).
        is_chosen: True if the number of tokens was configured, False if it is that of one whole context.
    """
    if num_tokens <= room:
        return
    needed, missing = (tokens * shape.bytes_per_slot / 2**30 for tokens in (num_tokens, num_tokens - room))
    what = f"--kv-cache-tokens {num_tokens}" if is_chosen else f"--kv-cache-tokens: one whole context, {num_tokens}"
    raise NoRoom(
        f"{what} tokens take {needed:.2f} GiB of {shape.device}, and {missing:.2f} GiB of that are missing: there is "
        f"room for {room} tokens"
    )


def default_num_tokens(context_len: int, num_sessions: int, room: int) -> int:
    """Returns how many tokens' keys and values the pool is made for: all that the sessions can hold, if there is room
    for so many; in any case one whole context."""
    # One block more for each session: its last one is seldom full.
    return max(context_len + TILE, min(room, num_sessions * (context_len + TILE))) // TILE * TILE


def free_memory() -> int:
    """Returns the bytes that this process may still take: those of the system, or of its control group."""
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    available = next((int(line.split()[1]) << 10 for line in meminfo.splitlines() if "MemAvailable" in line), 8 << 30)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available  # no control group of version 2
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
