"""The table of a GPU's room for sessions: computed from the models' shapes, and equal to the documents' table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models.kv_cache import CacheShape
from outrider_bench.workers.memory import MODELS, bytes_per_token, num_parameters, num_sessions, table

README = Path(__file__).parents[2] / "deploy" / "README.md"
PUBLISHED_BILLIONS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.55,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_its_authors_say(name: str) -> None:
    assert num_parameters(MODELS[name]) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.003)


def test_a_token_takes_what_a_slot_of_the_pool_takes() -> None:
    for size in MODELS.values():
        shape = CacheShape(
            size.num_layers, size.num_key_value_heads, size.head_dim, torch.bfloat16, torch.device("cpu")
        )
        assert bytes_per_token(size) == shape.bytes_per_slot


def test_a_model_that_is_larger_than_the_memory_has_room_for_nobody() -> None:
    assert num_sessions(MODELS["Llama-3.1-70B"], 141, 2048) == 0
    assert num_sessions(MODELS["Qwen3-8B"], 24, 2048) > 0


def test_the_documents_show_the_table_that_the_command_prints() -> None:
    assert table() in README.read_text(encoding="utf-8"), table()
