"""Helpers for draft trees and sessions in tests: whole paths at once, and the output so far."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.core.params import Source
from outrider.core.session import Session
from outrider.core.tree import DraftTree, Node, TokenId


def add_path(
    tree: DraftTree, base_len: int, token_ids: Iterable[TokenId], logprob: float, source: Source
) -> Node | None:
    """Claims a run of tokens from position `base_len` on, each with the same log-probability.

    Returns the last node, or None if it was not kept.
    """
    node = tree.anchor(base_len)
    for token_id in token_ids:
        if node is None:
            return None
        node = tree.add(node, token_id, logprob, source)
    return node


def output_of(session: Session) -> list[TokenId]:
    """Returns the tokens that a session has emitted."""
    return list(session.committed[len(session.spec.prompt_token_ids) :])
