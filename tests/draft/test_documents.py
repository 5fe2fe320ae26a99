"""Documents in batches: none sees another, and all are learnt from."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.models.demo.names import DEMO_FOLDER
from outrider_draft.answers import Document
from outrider_draft.documents import ATTENTION, batch_of, cut, endless, split
from outrider_draft.held_out import hidden_of


def document(length: int, first: int, seed: int = 0) -> Document:
    ids = np.random.default_rng(seed).integers(0, 2048, length).astype(np.int32)
    rows = length - first
    # The likeliest token of each place is the one that came.
    tops = np.stack([ids[first:], ids[first:]], 1)
    return Document(ids, first, tops, np.full((rows, 2), -1.0, np.float16))


def test_a_batch_has_the_rows_of_its_documents_alone() -> None:
    folder = DEMO_FOLDER / "draft"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
    documents = [document(19, 7, 1), document(33, 1, 2), document(5, 4, 3)]
    with torch.no_grad():
        found = hidden_of(packed, batch_of(documents))
        alone = [
            plain.model(input_ids=torch.from_numpy(each.token_ids[None].astype(np.int64))).last_hidden_state[0]
            for each in documents
        ]
    wanted = torch.cat([rows[each.first - 1 : -1] for rows, each in zip(alone, documents, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_token_of_the_target_is_a_row_once() -> None:
    documents = [document(length, first, length) for length, first in ((30, 3), (41, 40), (12, 5), (25, 0))]
    pieces = [piece for each in documents for piece in cut(each, 10)]
    assert max(len(piece.token_ids) for piece in pieces) <= 10
    batches = endless(pieces, 20, seed=1)
    batch, rows = next(batches), 0
    seen = set()
    while not seen & {tuple(batch.token_ids[0].tolist())}:
        seen.add(tuple(batch.token_ids[0].tolist()))
        assert batch.token_ids.shape[1] <= 20
        # A row predicts the token after it.
        assert batch.token_ids[0, batch.rows + 1].tolist() == batch.top_ids[:, 0].tolist()
        rows += len(batch.rows)
        if rows >= sum(len(piece.top_ids) for piece in pieces):
            break
        batch = next(batches)
    # First tokens of pieces have nothing before them.
    lost = sum(1 for each in documents for start in range(0, len(each.token_ids), 10) if start >= each.first)
    assert rows == sum(len(each.top_ids) for each in documents) - lost


def test_what_is_held_out_stays_so_when_documents_are_added() -> None:
    documents = [document(10, 2, seed) for seed in range(300)]
    _, before = split(documents[:200], 0.1)
    learnt, after = split(documents, 0.1)
    texts = {each.token_ids.tobytes() for each in after}
    assert {each.token_ids.tobytes() for each in before} <= texts
    assert not texts & {each.token_ids.tobytes() for each in learnt}
    assert 10 <= len(before) <= 40
    assert len(split(documents[:2], 0.0001)[1]) == 1
