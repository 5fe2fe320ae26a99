"""Prints how many sessions a GPU has room for, by model and context: `python -m outrider_bench.workers.memory`."""

from __future__ import annotations

from outrider.models.demo.widen import QWEN3_0_6B, QWEN3_8B, Size
from outrider.models.kv_cache import TILE
from outrider.models.pool_size import DEVICE_MEMORY_SHARE

MODELS = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-4B": Size(2560, 9728, 36, 32, 8, 128, 151_936, is_tied=True),
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": Size(5120, 17_408, 40, 40, 8, 128, 151_936, is_tied=False),
    "Qwen3-32B": Size(5120, 25_600, 64, 64, 8, 128, 151_936, is_tied=False),
    "Llama-3.1-8B": Size(4096, 14_336, 32, 32, 8, 128, 128_256, is_tied=False),
    "Llama-3.1-70B": Size(8192, 28_672, 80, 64, 8, 128, 128_256, is_tied=False),
}
MEMORIES_GB = (24, 48, 80, 141)
CONTEXTS = (2048, 8192, 32_768)
LIBRARIES_BYTES = 10**9
"""Approximate memory of CUDA and its libraries."""
NUM_BYTES = 2
"""Bytes of a number in bfloat16."""


def num_parameters(size: Size) -> int:
    """Counts the weights of a model, except its norms."""
    attention = 2 * size.hidden_size * size.head_dim * (size.num_heads + size.num_key_value_heads)
    layer = attention + 3 * size.hidden_size * size.intermediate_size
    return size.num_layers * layer + size.vocab_size * size.hidden_size * (1 if size.is_tied else 2)


def bytes_per_token(size: Size) -> int:
    """Returns the bytes of a token's keys and values in all layers."""
    return 2 * size.num_layers * size.num_key_value_heads * size.head_dim * NUM_BYTES


def num_sessions(size: Size, memory_gb: int, context: int) -> int:
    """Returns how many sessions of so many tokens fit into the pool of a verifier; 0 if the model itself does not
    fit."""
    free = memory_gb * 10**9 - LIBRARIES_BYTES - NUM_BYTES * num_parameters(size)
    # The last block of a session is seldom full.
    return max(0, int(DEVICE_MEMORY_SHARE * free / bytes_per_token(size) / (context + TILE)))


def table() -> str:
    """Returns the table in Markdown: a row for each model, a column for each size of memory."""
    columns = ["model", "weights, GB", "KiB a token", *(f"{memory} GB" for memory in MEMORIES_GB)]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for name, size in MODELS.items():
        weights = f"{NUM_BYTES * num_parameters(size) / 1e9:.1f}"
        found = [[num_sessions(size, memory, context) for context in CONTEXTS] for memory in MEMORIES_GB]
        cells = [" / ".join(map(str, counts)) if any(counts) else "–" for counts in found]
        lines.append(f"| {' | '.join([name, weights, str(bytes_per_token(size) // 1024), *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
