"""The tokenizer both models share: byte-level BPE with 2048 entries.

A small vocabulary keeps the embedding from dominating a 1 M parameter draft
and makes a full probability row 8 KB. ``<|endoftext|>`` is entry 0; it is the
start token, the end token and the separator between the documents of the
corpus, all in one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.models.demo.training.corpus import SourceFile

VOCABULARY_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

#: A conversation looks like comments in a source file, the closest thing to
#: a conversation that the model has seen.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '# ' + message['role'] + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '# assistant:' }}{%- endif -%}"
)


def train_tokenizer(sources: Sequence[SourceFile], context: int) -> PreTrainedTokenizerFast:
    """Learn the merges from the training files. Deterministic for given texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes: any text can be encoded, whatever the corpus lacks.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.text for source in sources), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        # The clean-up drops spaces before punctuation; code would not come back as it was.
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer saved in ``folder``, as any user of the models gets it."""
    return AutoTokenizer.from_pretrained(folder)


def encode_files(
    tokenizer: Any, sources: Sequence[SourceFile], *, shuffle_seed: int | None = None
) -> npt.NDArray[np.int64]:
    """All files as one stream of ids with ``<|endoftext|>`` before each of them."""
    texts = [source.text for source in sources]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(texts)
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.int64)
