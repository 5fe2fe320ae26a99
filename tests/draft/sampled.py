"""Answers of the demo target, sampled once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.models.loading import build_hf_model
from outrider_draft.answers import AnswersWriter, Document, Header

TARGET = "demo/target"
NUM_TOP = 20
PROMPTS = ("def add(self, a, b):\n", "import os\nimport sys\n", "class Test(unittest.TestCase):\n    def ", "for x in ")


@cache
def documents(count: int, new_tokens: int = 48) -> tuple[Document, ...]:
    """Returns sampled documents; the prompts take turns."""
    model, tokenizer = build_hf_model(TARGET)
    found: list[Document] = []
    torch.manual_seed(0)
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]] * (count // len(PROMPTS)))
        made: Any = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(made.logits, 1).log_softmax(-1).topk(NUM_TOP)
        for text, top_ids, logprobs in zip(made.sequences.int(), top.indices.int(), top.values.half(), strict=True):
            found.append(Document(text.numpy(), ids.shape[1], top_ids.numpy(), logprobs.numpy()))
    return tuple(found)


def header(**changes: object) -> Header:
    """Returns the header of the demo target's answers."""
    fields = {"model": TARGET, "tokenizer_hash": tokenizer_hash(build_hf_model(TARGET).tokenizer)}
    return Header(**{**fields, "vocab_size": 2048, "num_top": NUM_TOP, **changes})  # type: ignore[arg-type]


def write(folder: Path, count: int = 64, **changes: object) -> Path:
    """Writes a folder of answers."""
    writer = AnswersWriter(folder, header(**changes))
    for document in documents(count):
        writer.add(document)
    writer.close()
    return folder
