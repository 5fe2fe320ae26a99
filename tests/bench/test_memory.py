"""The table of a GPU's room for sessions: computed from the models' shapes, and equal to the documents' table."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.models.kv_cache import CacheShape
from outrider_bench.workers.memory import MODELS, bytes_per_token, table

README = Path(__file__).parents[2] / "deploy" / "README.md"


def test_a_token_takes_what_a_slot_of_the_pool_takes() -> None:
    for size in MODELS.values():
        shape = CacheShape(
            size.num_layers, size.num_key_value_heads, size.head_dim, torch.bfloat16, torch.device("cpu")
        )
        assert bytes_per_token(size) == shape.bytes_per_slot


def test_the_documents_show_the_table_that_the_command_prints() -> None:
    assert table() in README.read_text(encoding="utf-8"), table()
