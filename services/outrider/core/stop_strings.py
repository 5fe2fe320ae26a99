"""Stop strings in a text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds where a text first has one of several strings, and holds back what may still become one.

    The string that ends first counts; of two that end at the same place, the longer one. So the end does not depend on
    where the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str], *, includes_stop: bool = False) -> None:
        """
        Args:
            strings: At least one; none is empty.
            includes_stop: Whether the text has the stop string at its end.
        """
        self._strings, self._includes_stop = tuple(strings), includes_stop
        self._held = ""
        self._num_seen_ahead = 0
        """Characters behind what is held that were an outlook before."""
        self.found: str | None = None
        """The stop string, once the text has one."""

    def feed(self, piece: str, outlook: str = "", *, may_stop: bool = True) -> str:
        """Takes in the next piece; returns the text that is decided by it. Nothing may follow once a string is found.

        Args:
            piece: Follows the text so far.
            outlook: Follows the piece if the text ends here, as it does if a string is found. It comes again, or
                something else does, in later pieces.
            may_stop: False if a string that ends in this piece or in the outlook does not count.
        """
        text, num_before = self._held + piece + outlook, len(self._held) + self._num_seen_ahead
        self._num_seen_ahead = len(outlook)
        if may_stop and (match := self._first(text, num_before)) is not None:
            begin, end = match
            self.found, self._held = text[begin:end], ""
            return text[: end if self._includes_stop else begin]
        text = text[: len(text) - len(outlook)]
        num_held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Returns what was held back: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_before: int) -> tuple[int, int] | None:
        """Returns where the first stop string begins and ends that ends behind the first characters."""
        matches = []
        for string in self._strings:
            # A string that ended before was passed over, as it did not count there.
            begin = text.find(string, max(0, num_before - len(string) + 1))
            if begin >= 0:
                matches.append((begin, begin + len(string)))
        return min(matches, key=lambda match: (match[1], match[0]), default=None)


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest end of a text with which the string begins, the whole string not counted."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
