"""Measures a draft on documents that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.models.runner import head_token_ids
from outrider.models.training import autocast
from outrider_draft.answers import Document
from outrider_draft.documents import Batch, in_order
from outrider_draft.loss import measure

MAX_TOKENS = 16_384
"""Most tokens that are measured on, so that it takes seconds."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of a target's tokens for which a draft would have been kept."""

    greedy: float
    """Places with the same most likely token."""
    at_0_7: float
    """Mean of `sum(min(p, q))` at temperature 0.7, over the target's best tokens: a lower bound."""
    at_1: float
    """The same at temperature 1."""

    @property
    def mean(self) -> float:
        """Returns what two drafts are compared by."""
        return (self.greedy + self.at_0_7 + self.at_1) / 3

    def __str__(self) -> str:
        return f"greedy {self.greedy:.3f}, T=0.7 {self.at_0_7:.3f}, T=1 {self.at_1:.3f}"


def limited(documents: Sequence[Document]) -> list[Document]:
    """Returns the first documents of at most MAX_TOKENS tokens, at least one."""
    found: list[Document] = []
    room = MAX_TOKENS
    for document in documents:
        room -= len(document.token_ids)
        if found and room < 0:
            break
        found.append(document)
    return found


@torch.no_grad()
def acceptance(model: PreTrainedModel, documents: Sequence[Document], num_tokens: int) -> Acceptance:
    """Measures a draft in batches of at most `num_tokens` tokens."""
    model.train(False)
    num_rows, overlaps, num_same = 0, [0.0, 0.0], 0.0
    for batch in in_order(documents, num_tokens):
        moved = batch.to(str(model.device))
        with autocast(model.device):
            found = measure(hidden_of(model, moved), head_of(model), moved.top_ids, moved.top_logprobs)
        num_rows += found.num_rows
        num_same += found.num_same
        overlaps = [sum(pair) for pair in zip(overlaps, found.overlaps, strict=True)]
    model.train()
    at_1, at_0_7 = (each / num_rows for each in overlaps)
    return Acceptance(num_same / num_rows, at_0_7, at_1)


def hidden_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Returns the input of the head at the rows of a batch, [num_rows, hidden_size]."""
    body: Any = model.base_model
    output = body(
        input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False, bounds=batch.bounds
    ).last_hidden_state
    hidden: torch.Tensor = output[0, batch.rows]
    return hidden


def head_of(model: PreTrainedModel) -> torch.Tensor:
    """Returns the weights of the head, [num_tokens, hidden_size]: of all tokens, or of those that it is limited to."""
    weight: torch.Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    kept = head_token_ids(model)
    return weight if kept is None else weight[kept]
