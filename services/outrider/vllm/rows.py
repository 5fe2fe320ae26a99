"""Which session a row of vLLM's batch is, by its tokens alone: a proposer is told no request ids.

Rows move when others end, vanish while their request is preempted, and come back with all their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.core.tree import TokenId

MAX_ABSENT_STEPS = 32
"""Steps without a row after which its session has ended. A preempted request that comes back later begins anew."""
TAIL_LEN = 16
"""Last tokens by which a row that has moved is looked up, before all of them are compared."""

Tokens = npt.NDArray[np.int32]


class Sighting(NamedTuple):
    """What a step has added to one session."""

    number: int
    """Names the session."""
    base_len: int
    """Tokens that it had before. 0: it begins here."""
    token_ids: list[TokenId]
    """New tokens; of a session that begins, all."""

    @property
    def length(self) -> int:
        """Tokens that it has now."""
        return self.base_len + len(self.token_ids)


class _Known:
    """The tokens of one session."""

    def __init__(self, number: int, token_ids: Tokens) -> None:
        self.number = number
        self.row = self.seen_at = 0
        self.length = 0
        self._token_ids: Tokens = np.empty(2 * len(token_ids) + TAIL_LEN, np.int32)
        self.extend(token_ids)

    def extend(self, token_ids: Tokens) -> None:
        length = self.length + len(token_ids)
        if length > len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty(length, np.int32)])
        self._token_ids[self.length : length] = token_ids
        self.length = length

    @property
    def key(self) -> tuple[int, bytes]:
        return key_of(self._token_ids, self.length)

    def is_continued_by(self, token_ids: Tokens) -> bool:
        is_long_enough = self.length <= len(token_ids)
        return is_long_enough and np.array_equal(self._token_ids[: self.length], token_ids[: self.length])


def key_of(token_ids: Tokens, length: int) -> tuple[int, bytes]:
    """Returns what sessions are looked up by: the length of a text, and its last tokens."""
    return length, token_ids[max(0, length - TAIL_LEN) : length].tobytes()


class RowTracker:
    """Tells the sessions of a batch apart, step after step. Of rows with equal texts each is a session of its own."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._step = self._num_sessions = 0

    def observe(
        self, sampled: Sequence[Sequence[TokenId]], lengths: Sequence[int] | npt.NDArray[Any], token_ids: Tokens
    ) -> tuple[list[Sighting], list[int]]:
        """Takes in a step.

        Args:
            sampled: Tokens that the step has drawn for each row; none for a row whose prompt is read in pieces.
            lengths: Tokens of each row, these included. May have more entries than there are rows.
            token_ids: The rows' tokens, [rows, columns]; only the first `lengths[row]` of a row count.

        Returns:
            The session of each row, and the numbers of the sessions that have ended.
        """
        self._step += 1
        texts = [token_ids[row, : int(lengths[row])] for row in range(len(sampled))]
        # In its old place first: most rows stay where they are.
        found: dict[int, _Known] = {}
        by_row = {known.row: known for known in self._known if known.seen_at == self._step - 1}
        for row, text in enumerate(texts):
            if row in by_row and by_row[row].is_continued_by(text):
                found[row] = by_row[row]
        if len(found) < len(texts):
            self._look_up(sampled, texts, found)
        sightings = [self._sight(row, text, found.get(row)) for row, text in enumerate(texts)]
        return sightings, list(self._forget())

    def clear(self) -> list[int]:
        """Forgets all sessions. Returns their numbers."""
        ended, self._known = [known.number for known in self._known], []
        return ended

    def _look_up(self, sampled: Sequence[Sequence[TokenId]], texts: Sequence[Tokens], found: dict[int, _Known]) -> None:
        """Finds the sessions of rows that have moved."""
        taken = {id(known) for known in found.values()}
        moved: dict[tuple[int, bytes], list[_Known]] = {}
        for known in self._known:
            if id(known) not in taken:
                moved.setdefault(known.key, []).append(known)
        for row, text in enumerate(texts):
            if row in found:
                continue
            candidates = moved.get(key_of(text, len(text) - len(sampled[row])), [])
            match = next((each for each in candidates if each.is_continued_by(text)), None)
            if match is not None:
                candidates.remove(match)
                found[row] = match

    def _sight(self, row: int, text: Tokens, known: _Known | None) -> Sighting:
        base_len = 0 if known is None else known.length
        if known is None:
            self._num_sessions += 1
            known = _Known(self._num_sessions, text)
            self._known.append(known)
        else:
            known.extend(text[base_len:])
        known.row, known.seen_at = row, self._step
        return Sighting(known.number, base_len, text[base_len:].tolist())

    def _forget(self) -> Iterator[int]:
        ended = [known for known in self._known if self._step - known.seen_at > MAX_ABSENT_STEPS]
        if ended:
            self._known = [known for known in self._known if known not in ended]
        for known in ended:
            yield known.number
