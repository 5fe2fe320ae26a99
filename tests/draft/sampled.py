"""Answers of the demo target, sampled once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from outrider.models.demo.training.batches import sample_continuations
from outrider.models.loading import build_hf_model, tokenizer_hash
from outrider_draft.answers import AnswersWriter, Document, Header

TARGET = "demo/target"
NUM_TOP = 20
PROMPTS = ("def add(self, a, b):\n", "import os\nimport sys\n", "class Test(unittest.TestCase):\n    def ", "for x in ")


@cache
def documents(count: int, new_tokens: int = 48) -> tuple[Document, ...]:
    """Returns sampled documents; the prompts take turns."""
    model, tokenizer = build_hf_model(TARGET)
    found: list[Document] = []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]] * (count // len(PROMPTS)))
        generator = torch.Generator().manual_seed(number)
        texts = sample_continuations(model, ids, new_tokens, 0.7, generator)  # type: ignore[arg-type]
        first = ids.shape[1]
        with torch.no_grad():
            logprobs = model(input_ids=texts).logits[:, first - 1 : -1].log_softmax(-1)
        top = logprobs.topk(NUM_TOP)
        found += [
            Document(
                text.numpy().astype(np.int32), first, ids.numpy().astype(np.int32), best.numpy().astype(np.float16)
            )
            for text, ids, best in zip(texts, top.indices, top.values, strict=True)
        ]
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
