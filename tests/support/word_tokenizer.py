"""A tokenizer of whole words, for tiny models."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(vocabulary: int | Mapping[str, int]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of so many words, `end`, `w1`, `w2` and so on; or of the given words with their ids. The first
    one ends a text."""
    if isinstance(vocabulary, int):
        vocabulary = {f"w{i}" if i else "end": i for i in range(vocabulary)}
    first = next(iter(vocabulary))
    backend = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=first))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=first)  # type: ignore[no-untyped-call]
