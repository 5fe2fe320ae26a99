"""Documents in batches without padding: an endless order of them, what is held out, and attention inside each alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider_draft.answers import Document

MAX_LEN = 2048
"""Most tokens of a document in a batch: a longer one is cut into pieces."""
ATTENTION = "outrider-documents"
"""Name of the attention that `inside_documents` is."""
_HELD_OUT_PARTS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents one after the other."""

    token_ids: Tensor
    """[1, num_tokens], int64."""
    position_ids: Tensor
    """[1, num_tokens], from 0 in each document."""
    bounds: tuple[int, ...]
    """Where the documents begin, and the end of the last one."""
    rows: Tensor
    """Places whose next token the target wrote, [num_rows]."""
    top_ids: Tensor
    """[num_rows, num_top], int64."""
    top_logprobs: Tensor
    """[num_rows, num_top], float32."""

    def to(self, device: str) -> Batch:
        """Returns the batch on a device."""
        return Batch(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.bounds,
            self.rows.to(device),
            self.top_ids.to(device),
            self.top_logprobs.to(device),
        )


def split(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Splits documents into those to learn from and those held out.

    The text of a document decides, so that a document stays where it is when others are added. At least one document is
    on each side if there are two.
    """
    ranks = [zlib.crc32(document.token_ids.tobytes()) % _HELD_OUT_PARTS for document in documents]
    order = sorted(range(len(documents)), key=lambda index: (ranks[index], index))
    num_held_out = sum(rank < share * _HELD_OUT_PARTS for rank in ranks)
    num_held_out = min(max(num_held_out, 1), len(documents) - 1)
    held_out = set(order[:num_held_out])
    learnt = [document for index, document in enumerate(documents) if index not in held_out]
    return learnt, [documents[index] for index in order[:num_held_out]]


def cut(document: Document, length: int = MAX_LEN) -> Iterator[Document]:
    """Yields a document in pieces of at most `length` tokens, without those that the target wrote nothing of."""
    for start in range(0, len(document.token_ids), length):
        end = min(start + length, len(document.token_ids))
        # The first token of a piece has nothing before it to be predicted from.
        first = max(document.first, start + 1)
        if first < end:
            rows = slice(first - document.first, end - document.first)
            ids = document.token_ids[start:end]
            yield Document(ids, first - start, document.top_ids[rows], document.top_logprobs[rows])


def endless(documents: Sequence[Document], num_tokens: int, seed: int, skipped: int = 0) -> Iterator[Batch]:
    """Yields batches for ever, each time through all documents in another order.

    Args:
        documents: At least one, of at most `num_tokens` tokens.
        num_tokens: Most tokens of a batch.
        seed: Of the orders.
        skipped: Batches to leave out at the beginning: those of an interrupted run.
    """
    number = 0
    for epoch in range(1 << 62):
        order = np.random.default_rng((seed, epoch)).permutation(len(documents))
        for group in _groups([documents[index] for index in order], num_tokens):
            number += 1
            if number > skipped:
                yield batch_of(group)


def in_order(documents: Sequence[Document], num_tokens: int) -> Iterator[Batch]:
    """Yields the documents once, in batches of at most `num_tokens` tokens."""
    yield from map(batch_of, _groups(documents, num_tokens))


def _groups(documents: Sequence[Document], num_tokens: int) -> Iterator[list[Document]]:
    group: list[Document] = []
    room = num_tokens
    for document in documents:
        if group and len(document.token_ids) > room:
            yield group
            group, room = [], num_tokens
        group.append(document)
        room -= len(document.token_ids)
    if group:
        yield group


def batch_of(documents: Sequence[Document]) -> Batch:
    """Returns documents as one batch."""
    lengths = [len(document.token_ids) for document in documents]
    bounds = (0, *np.cumsum(lengths).tolist())
    rows = [
        # The row before a token predicts it.
        np.arange(start + document.first - 1, end - 1)
        for document, (start, end) in zip(documents, pairwise(bounds), strict=True)
    ]
    return Batch(
        torch.from_numpy(np.concatenate([each.token_ids for each in documents]).astype(np.int64))[None],
        torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        bounds,
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate([each.top_ids for each in documents]).astype(np.int64)),
        torch.from_numpy(np.concatenate([each.top_logprobs for each in documents]).astype(np.float32)),
    )


def inside_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: Sequence[int],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends causally inside each document of a batch: nothing crosses, and no product is spent on a mask.

    Args:
        module: The layer's attention.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_key_value_heads, num_tokens, head_dim].
        value: As `key`.
        attention_mask: None.
        bounds: Those of the batch.
        scaling: Factor of the scores.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no weights.
    """
    pieces = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, inside_documents)
