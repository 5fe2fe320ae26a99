"""Stop strings in a text that comes piece by piece."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

SIGN = 0xD800
"""The first of the characters that stand for special tokens: halves of surrogate pairs, which do not occur in texts."""


class StopStrings:
    """Finds the first of several strings in a text, and holds back the end of the text that may still become one.

    The string that ends first counts; of two that end at the same place, the longer one. So the end does not depend on
    how the text is cut into pieces. Special tokens that are left out of the visible text count as a whole or not at
    all: a string may contain one as it is written, but never ends within one.
    """

    def __init__(
        self, strings: Sequence[str], special_tokens: Collection[str] = (), *, includes_stop: bool = False
    ) -> None:
        """
        Args:
            strings: At least one; none is empty.
            special_tokens: The special tokens that are left out of the visible text, as they are written.
            includes_stop: Whether the text has the stop string at its end, all of it.
        """
        self._includes_stop = includes_stop
        named = sorted(token for token in special_tokens if any(token in string for string in strings))
        self._signs = {token: chr(SIGN + number) for number, token in enumerate(named)}
        self._strings = {string: string for string in strings} | {
            self._with_signs(string): string for string in strings
        }
        """The strings by their forms in a text: as they are, and with signs in place of special tokens."""
        self._held = ""
        self._num_seen_ahead = 0
        """Characters after the held text that were an outlook before."""
        self.found: str | None = None
        """The stop string, once the text has one."""

    def feed(self, piece: str, outlook: str = "", left_out: str = "", *, may_stop: bool = True) -> str:
        """Takes in the next piece; returns the text that it decides. No piece may follow once a string is found.

        Args:
            piece: Follows the text so far.
            outlook: Follows the piece if the text ends here, as it does if a string is found. Later pieces bring it
                again, or other characters in its place.
            left_out: A special token that follows, and is not in the visible text.
            may_stop: False if a string that ends in this piece or after it does not count.
        """
        sign, num_before = self._signs.get(left_out, ""), len(self._held) + self._num_seen_ahead
        self._num_seen_ahead = len(outlook)
        text = self._held + piece + outlook + sign
        if may_stop and (match := self._first(text, num_before)) is not None:
            _, begin, self.found = match
            self._held = ""
            return self._told(text[:begin]) + (self.found if self._includes_stop else "")
        text = self._held + piece + sign
        begin = min(self._begun(text, places) for places in self._views(text))
        self._held = text[begin:]
        return self._told(text[:begin])

    def finish(self) -> str:
        """Returns what was held back: no more text follows."""
        held, self._held = self._held, ""
        return self._told(held)

    def _first(self, text: str, num_before: int) -> tuple[int, int, str] | None:
        """Returns end and beginning of the first stop string that ends after the first `num_before` characters, and the
        string."""
        matches = []
        for places in self._views(text):
            view, first = _at(text, places), bisect_left(places, num_before)
            for form, string in self._strings.items():
                # Strings that ended before did not count there, and are skipped.
                begin = view.find(form, max(0, first - len(form) + 1))
                if begin >= 0:
                    matches.append((places[begin + len(form) - 1] + 1, places[begin], string))
        return min(matches, default=None)

    def _begun(self, text: str, places: Sequence[int]) -> int:
        """Returns where the part of a text's view begins that may become a stop string; the text's end if there is
        none."""
        overlap = max((_overlap(_at(text, places), form) for form in self._strings), default=0)
        return places[len(places) - overlap] if overlap else len(text)

    def _views(self, text: str) -> list[Sequence[int]]:
        """Returns the places of all characters and, if some characters are signs, also the places of the others."""
        views: list[Sequence[int]] = [range(len(text))]
        if any(sign in text for sign in self._signs.values()):
            views.append([place for place, character in enumerate(text) if character not in self._signs.values()])
        return views

    def _told(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self._signs.values())))

    def _with_signs(self, string: str) -> str:
        # Longest first: where one token begins another, the longer one is meant.
        for token in sorted(self._signs, key=len, reverse=True):
            string = string.replace(token, self._signs[token])
        return string


def _at(text: str, places: Sequence[int]) -> str:
    """Returns the characters at some places."""
    return text if len(places) == len(text) else "".join([text[place] for place in places])


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest end of a text that is a proper beginning of the string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
