"""Tokenizers with more tokens than their model has rows, and with ids that have no token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.params import InvalidParameter
from outrider.core.structure import Structure, StructureKind
from outrider.models.loading import LoadedModel, load_model
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.v1 import types_pb2, verifier_pb2
from outrider.verifier.admission import prompt_token_ids
from tests.support.word_tokenizer import word_tokenizer


def load(folder: Path, words: Mapping[str, int], num_rows: int) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=[0, 21],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(words).save_pretrained(folder)
    return load_model(str(folder), dtype="float32", num_tokens=256)


WORDS = {f"w{i}": i for i in range(20)}


def test_tokens_without_rows_are_no_part_of_the_vocabulary_and_told_of(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        loaded = load(tmp_path, {**WORDS, "new_a": 20, "new_b": 21}, 20)
    assert (loaded.vocab_size, loaded.eos_token_ids) == (20, (0,))
    (told,) = (line for line in lines if line["event"] == "model.tokens_without_rows")
    assert (told["tokens"], told["num_rows"]) == (["new_a", "new_b"], 20)
    codec = TextCodec(loaded.tokenizer)
    prompt = verifier_pb2.Prompt(text="w3 w4")
    assert prompt_token_ids(prompt, loaded, codec) == (3, 4)
    # Grammars spell with the tokenizer's tokens, and allow the model's.
    mask = Grammars(loaded.tokenizer, 20, (0,)).matcher(Structure(StructureKind.REGEX, "(w|n).*")).mask()
    assert len(mask) == 20
    for wrong in (
        verifier_pb2.Prompt(text="w3 new_b"),
        verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=[3, 21])),
    ):
        with pytest.raises(InvalidParameter, match=r"^prompt.* in \[0, 20\).* got 21$"):
            prompt_token_ids(wrong, loaded, codec)


def test_ids_without_a_token_are_taken_and_stand_for_nothing(tmp_path: Path) -> None:
    words = {word: token_id for word, token_id in WORDS.items() if token_id not in (5, 17, 18)}
    loaded = load(tmp_path, words, 24)
    assert loaded.vocab_size == 20
    codec = TextCodec(loaded.tokenizer)
    prompt = verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=[19, 18, 5]))
    assert prompt_token_ids(prompt, loaded, codec) == (19, 18, 5)
    assert codec.decode([19, 18, 5]) == "w19"
    grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    assert grammars.token_bytes([19, 18, 5]) == [b"w19", b"", b""]
    mask = grammars.matcher(Structure(StructureKind.REGEX, "w1.*")).mask()
    assert [token_id for token_id in range(20) if mask[token_id]] == [1, *range(10, 17), 19]
