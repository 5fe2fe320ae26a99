"""Tokenizers of kinds that the demo models do not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.models.loading import LoadedModel
from tests.support.services import target_model

WORDS = ("\u2581", "\u2581river", "\u2581stone", "river", "r", "i", "v", "e", "s", ".", "[", "]")


def sentencepiece_like() -> Any:
    """A tokenizer like Llama 2's: it puts a space before each text, which its decoder strips, and falls back to bytes.
    Its template puts each message in brackets."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in WORDS:
        vocab[word] = len(vocab)
    merges = [("r", "i"), ("ri", "v")]
    vocab |= {"ri": len(vocab), "riv": len(vocab) + 1}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ '[' + message.content + ']' }}{% endfor %}",
    )


def model_like_llama_2() -> LoadedModel:
    """The demo target with that tokenizer. It keeps its own end token."""
    return replace(target_model(), tokenizer=sentencepiece_like())
