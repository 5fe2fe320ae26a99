"""Structured output: texts that obey a grammar, under speculation.

Every row of a round is drawn without the grammar, as ever. On the walk from the root down, which only the target's own
draws decide, each draw is shown to the grammar's matcher: an allowed one stands, and a refused one is drawn again,
with the allowed tokens alone and *the same noise*. By Gumbel-max, an allowed draw from all tokens is the draw from the
allowed ones, so the text is a pure function of prompt, parameters, seed and grammar, whatever was drafted. Filters that
look at the whole distribution (top_k, top_p, min_p) come after the grammar: there each row of the walk is drawn again.
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
    """Lets special tokens stand for the text that they are written as."""
    begins_after: str = ""
    """It holds behind this text, which the output must come to. Empty means from the beginning."""


class StructureBroken(Exception):
    """A text cannot go on under its grammar: it has become too complex for the limits of time and memory."""


class Matcher(Protocol):
    """Follows one text through a grammar."""

    def consume(self, token_id: TokenId) -> bool:
        """Takes the next token in; returns False, and stays as it is, if the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Takes back as many of the latest tokens."""

    def num_allowed(self, token_ids: Sequence[TokenId]) -> int:
        """Returns how many of these tokens, from the first, may follow, and stays as it is."""

    def forced(self) -> list[TokenId]:
        """Returns tokens that spell what must come next: a guess, as it may be spelled by others."""

    @property
    def is_over(self) -> bool:
        """True if the text is complete, and nothing may follow."""


class StructuredText:
    """Holds one generation to its grammar. An `outrider.core.session.Ending`, too: it ends where the grammar does."""

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
        """Something else that has gone wrong with the draws of a round; its session ends with it."""
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
            self.error = str(error)  # not raised: others are in the same step. The next round ends with it
        return None

    def settled(
        self,
        nodes: Sequence[Node],
        draws: Sequence[TokenId],
        redraw: Callable[[int, Matcher], TokenId],
        *,
        redraws_all: bool,
    ) -> list[TokenId]:
        """Returns draws of which those that are reached obey the grammar.

        Args:
            nodes: Drafted tokens of the round, parents before children.
            draws: The target's token for each row: the root's, then those of the nodes.
            redraw: Draws a row again, of the tokens that the matcher allows where it stands.
            redraws_all: Whether every row that is reached is drawn again, not only where its draw is refused.

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
        """Removes those nodes from the tree that the grammar does not allow; returns True if there were any.

        Raises:
            StructureBroken: The text cannot go on.
        """
        is_pruned, inner = False, {node.parent for node in nodes}
        for node in nodes:
            # A path that is allowed has no node that is not. And a node may have gone with one above it.
            if node in inner or node.parent is None:
                continue
            path = path_to(node, self._tree.root)
            num_forbidden = len(path) - self._matcher.num_allowed(path)
            if num_forbidden:
                self._tree.remove(_above(node, num_forbidden - 1))
                is_pruned = True
        return is_pruned

    def forced(self) -> list[TokenId]:
        """Returns tokens that spell what the grammar forces next."""
        return self._matcher.forced()

    def behind(self, path: Sequence[TokenId]) -> Matcher | None:
        """Moves the matcher behind a path below the root, for `Matcher.rollback` to bring it back; None if the grammar
        does not allow the path."""
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
