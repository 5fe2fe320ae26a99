"""Structured output: texts that obey a grammar, under speculation.

Every row of a round is drawn without the grammar, as always. The target's own draws decide the walk from the root down.
On it, each draw is shown to the grammar's matcher: an allowed one stands, and a refused one is drawn again from the
allowed tokens alone, with *the same noise*. By Gumbel-max, an allowed draw from all tokens is the draw from the allowed
ones, so the text is a pure function of prompt, parameters, seed and grammar, whatever was drafted. Filters that depend
on the whole distribution (top_k, top_p, min_p) come after the grammar: with these, each row of the walk is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from outrider.core.tree import DraftTree, Node, TokenId, path_to


class StructureKind(Enum):
    """The languages that a structure may be described in. The values are the fields of the wire."""

    JSON = "json"
    """A JSON schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object; it has no description."""
    REGEX = "regex"
    """A regular expression of the whole text."""
    GRAMMAR = "grammar"
    """A context-free grammar, in Lark's notation or in GBNF."""
    CHOICE = "choice"
    """One of several texts: a JSON list of strings."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A description of the texts that are allowed."""

    kind: StructureKind
    text: str
    """Description in the language of its kind."""
    special_tokens_as_text: bool = False
    """True if special tokens may stand for the text that they are written as."""
    begins_after: str = ""
    """The structure begins after this text, which the output must contain. Empty means from the beginning."""


class StructureBroken(Exception):
    """A text cannot go on under its grammar: it has become too complex for the limits of time and memory."""


class Matcher(Protocol):
    """Follows one text through a grammar."""

    def consume(self, token_id: TokenId) -> bool:
        """Takes in the next token. Returns False, without a change, if the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back as many of the latest tokens."""

    def num_allowed(self, token_ids: Sequence[TokenId]) -> int:
        """Returns how many of these tokens, from the first, may follow, without a change."""

    def forced(self) -> list[TokenId]:
        """Returns tokens that spell the text that must come next: a guess, as other tokens may spell it, too."""

    @property
    def is_over(self) -> bool:
        """True if the text is complete, and no token may follow."""


class StructuredText:
    """Holds one generation to its grammar. Also an `outrider.core.session.Ending`: it ends where the grammar does."""

    def __init__(self, matcher: Matcher, tree: DraftTree, token_ids: Sequence[TokenId] = ()) -> None:
        """
        Args:
            matcher: At the beginning of the output.
            tree: Draft tree of the generation.
            token_ids: Output so far, which the grammar allows.
        """
        self._matcher, self._tree = matcher, tree
        self.error = ""
        """Says why the text cannot go on, if it cannot."""
        self.failure: Exception | None = None
        """Another failure of a round's draws; the session ends with it."""
        self.take(token_ids)

    def take(self, token_ids: Sequence[TokenId]) -> int | None:
        """See `outrider.core.session.Ending`."""
        try:
            for number, token_id in enumerate(token_ids, start=1):
                if not self._matcher.consume(token_id):
                    raise StructureBroken("a committed token is not allowed")
                if self._matcher.is_over:
                    return number
        except StructureBroken as error:
            self.error = str(error)  # not raised, for the other sessions of the step; the next round ends with it
        return None

    def settled(
        self,
        nodes: Sequence[Node],
        draws: Sequence[TokenId],
        redraw: Callable[[int, Matcher], TokenId],
        *,
        redraws_all: bool,
    ) -> list[TokenId]:
        """Returns the draws, with those on the walk from the root replaced where the grammar does not allow them.

        Args:
            nodes: Drafted tokens of the round, parents before children.
            draws: The target's token for each row: the root's, then those of the nodes.
            redraw: Draws a row again, from the tokens that the matcher allows at its present place.
            redraws_all: True if every row on the walk is drawn again, not only those with a refused draw.

        Raises:
            StructureBroken: The text cannot go on.
        """
        if self.error:
            raise StructureBroken(self.error)
        settled, rows = list(draws), {node: row for row, node in enumerate(nodes, start=1)}
        node, row, num_consumed = self._tree.root, 0, 0
        while True:
            is_refused = redraws_all or not self._matcher.consume(settled[row])
            if is_refused:
                settled[row] = redraw(row, self._matcher)
                if not self._matcher.consume(settled[row]):
                    raise StructureBroken("a token that the grammar allows is refused by it")
            num_consumed += 1
            child = node.children.get(settled[row])
            if self._matcher.is_over or child is None or child not in rows:
                break
            node, row = child, rows[child]
        self._matcher.rollback(num_consumed)
        return settled

    def prune(self, nodes: Sequence[Node]) -> bool:
        """Removes the nodes that the grammar does not allow from the tree. Returns True if there were any.

        Raises:
            StructureBroken: The text cannot go on.
        """
        is_pruned, inner = False, {node.parent for node in nodes}
        for node in nodes:
            # All nodes of an allowed path are allowed. A node may have been removed with one above it.
            if node in inner or node.parent is None:
                continue
            path = path_to(node, self._tree.root)
            num_forbidden = len(path) - self._matcher.num_allowed(path)
            if num_forbidden:
                self._tree.remove(_above(node, num_forbidden - 1))
                is_pruned = True
        return is_pruned

    def forced(self) -> list[TokenId]:
        """Returns tokens that spell the text that the grammar forces next."""
        return self._matcher.forced()

    def behind(self, path: Sequence[TokenId]) -> Matcher | None:
        """Returns the matcher, moved to the end of a path below the root; `Matcher.rollback` brings it back. None if
        the grammar does not allow the path."""
        for number, token_id in enumerate(path):
            if self._matcher.is_over or not self._matcher.consume(token_id):
                self._matcher.rollback(number)
                return None
        return self._matcher


def _above(node: Node, num_levels: int) -> Node:
    for _ in range(num_levels):
        assert node.parent is not None
        node = node.parent
    return node
