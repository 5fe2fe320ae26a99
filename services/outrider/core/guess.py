"""What retrieval guesses: a few tokens in a row, with alternatives where it is not sure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.calibration import Key
from outrider.core.tree import TokenId


@dataclass(slots=True)
class Guess:
    """A guessed path, with alternatives at its beginning. The lists run in parallel; parents come first, and of two
    siblings the more probable one."""

    match_len: int
    parents: list[int]
    """Index of the parent in these lists; -1 = the end of the context."""
    token_ids: list[TokenId]
    keys: list[Key]
    """What each is counted under in the calibration."""

    def add(self, parent: int, token_id: TokenId, key: Key) -> int:
        """Adds a token; returns its index."""
        self.parents.append(parent)
        self.token_ids.append(token_id)
        self.keys.append(key)
        return len(self.token_ids) - 1

    def path(self) -> list[TokenId]:
        """The most probable tokens in a row."""
        path: list[TokenId] = []
        tip = -1
        for index, parent in enumerate(self.parents):
            if parent == tip:
                path.append(self.token_ids[index])
                tip = index
        return path
