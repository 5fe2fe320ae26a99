"""Own text: the tokens that one session has committed, as a source of guesses (prompt lookup, Saxena 2023).

Pure: token ids in, token ids out. A guess may be wrong; it never raises for a context that is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.ngrams import Ngram, TokenId
from outrider.core.params import check


class OwnText:
    """One session's committed tokens, indexed by n-gram.

    Keeps the latest occurrence only: on source code and on documentation, a vote over the last 16 occurrences and the
    one with the longest common past had as many tokens accepted, within 2 %. N-grams of 2 to 4: nothing is gained
    beyond 4. Matches of a single token had a quarter more tokens accepted, for 60 to 85 % more proposed ones: worth it
    only where verifying is all but free.
    """

    def __init__(self, min_match_len: int = 2, max_match_len: int = 4) -> None:
        check(1 <= min_match_len <= max_match_len, "min_match_len", f"in [1, {max_match_len}]", min_match_len)
        self._lengths = range(max_match_len, min_match_len - 1, -1)
        self._max_match_len = max_match_len
        self._token_ids: list[TokenId] = []
        self._latest: dict[Ngram, int] = {}  # n-gram -> position of the token that followed it last

    def __len__(self) -> int:
        return len(self._token_ids)

    def append(self, token_ids: Iterable[TokenId]) -> None:
        """Adds committed tokens. Costs one dictionary entry for each token and n-gram length."""
        tokens = self._token_ids
        for token_id in token_ids:
            position = len(tokens)
            for n in self._lengths:
                if n <= position:
                    self._latest[tuple(tokens[position - n :])] = position
            tokens.append(token_id)

    def continuation(self, context: Sequence[TokenId], max_len: int) -> list[TokenId]:
        """Guesses up to max_len tokens that follow the context; fewer, or none, where the text knows no more.

        The context is the end of the committed tokens and of the chain behind them, if any; only its last max_match_len
        tokens matter. Where the copied passage reaches the end of the text, the guess itself is looked up, so that a
        repetition goes on.
        """
        tail = list(context[-self._max_match_len :])
        known = len(tail)
        while (missing := max_len + known - len(tail)) > 0:
            position = self._position_after(tail)
            if position is None:
                break
            tail += self._token_ids[position : position + missing]
        return tail[known:]

    def _position_after(self, tail: Sequence[TokenId]) -> int | None:
        for n in self._lengths:
            if n <= len(tail):
                position = self._latest.get(tuple(tail[-n:]))
                if position is not None:
                    return position
        return None
