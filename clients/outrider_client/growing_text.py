"""Text that is read while it grows. What is read of it never depends on the pieces in which it came.

Every method that reads is a generator: it yields where it needs more text, and returns what it has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, NoReturn, TypeAlias, TypeVar

_T = TypeVar("_T")

Reading: TypeAlias = Generator[None, None, _T]
"""Yields while the text is too short to tell; returns the rest."""

_SPACES = re.compile(r"\s*")
_JSON_STRING_STOP = re.compile(r'["\\]')
_PYTHON_STOP = re.compile(r"""['"\\\[\](){}]""")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class Unreadable(ValueError):
    """The text does not go on as expected."""


class GrowingText:
    """Holds the text so far and the place up to which it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_over = False
        """True once no more text will come."""

    def forget(self) -> None:
        """Drops what was read. Positions from before are void."""
        self.text, self.position = self.text[self.position :], 0

    def ahead(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end of the text."""
        while self.position == len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.position]

    def skips(self, literal: str) -> Reading[bool]:
        """Reads a literal text if it comes next. Returns False, and reads nothing, if another text comes."""
        while not self.text.startswith(literal, self.position):
            if self.is_over or not literal.startswith(self.text[self.position : self.position + len(literal)]):
                return False
            yield
        self.position += len(literal)
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Reads a literal text. Raises Unreadable if another text comes."""
        if not (yield from self.skips(literal)):
            raise Unreadable(f"{literal!r} must come next")

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads as far as a pattern goes, which must be characters of a class, any number of them."""
        start = self.position
        while True:
            match = pattern.match(self.text, self.position)
            assert match is not None, "any number is also none"
            self.position = match.end()
            if self.position < len(self.text) or self.is_over:
                return self.text[start : self.position]
            yield

    def spaces(self) -> Reading[str]:
        """Reads white space, if any."""
        return (yield from self.run(_SPACES))

    def until(self, marker: str) -> Reading[str]:
        """Reads up to a marker and the marker itself; returns what stood before it. Raises Unreadable without one."""
        start = searched = self.position
        while (end := self.text.find(marker, searched)) < 0:
            if self.is_over:
                raise Unreadable(f"{marker!r} never comes")
            # The marker may have begun.
            searched = max(start, len(self.text) - len(marker) + 1)
            yield
        self.position = end + len(marker)
        return self.text[start:end]

    def json(self) -> Reading[Any]:
        """Reads a JSON object or array. Raises Unreadable as soon as it can be none."""
        start, scan = self.position, _JsonScan()
        while not scan.is_complete:
            if not (yield from self.ahead()):
                raise Unreadable("the JSON value does not end")
            self.position = scan.advance(self.text, self.position)
        try:
            # Not strict: models write line breaks in strings as they are.
            return json.loads(self.text[start : self.position], strict=False, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Unreadable(str(error)) from error

    def brackets(self) -> Reading[str]:
        """Reads from a bracket to its partner, as Python counts them: not in strings. Raises Unreadable where a wrong
        one closes, and without a partner."""
        start, open_brackets, quote = self.position, list[str](), ""
        while True:
            match = _PYTHON_STOP.search(self.text, self.position)
            self.position = match.end() if match else len(self.text)
            if match is None:
                if not (yield from self.ahead()):
                    raise Unreadable("the bracket does not close")
                continue
            sign = match[0]
            if sign == "\\":
                # Whatever it escapes, a quote perhaps, is skipped; outside of strings Python has none.
                if not (yield from self.ahead()):
                    raise Unreadable("the bracket does not close")
                self.position += 1
            elif quote:
                quote = "" if sign == quote else quote
            elif sign in "'\"":
                quote = sign
            elif sign in _CLOSERS:
                open_brackets.append(_CLOSERS[sign])
            elif not open_brackets or open_brackets.pop() != sign:
                raise Unreadable(f"{sign!r} closes nothing")
            elif not open_brackets:
                return self.text[start : self.position]


class _JsonScan:
    """Finds the end of a JSON object or array, character by character, and what can be none."""

    def __init__(self) -> None:
        self.is_complete = False
        self._closers: list[str] = []
        # What may come next: v a value, k a key, e the end of what is open, : and , themselves. s: within a scalar.
        self._next = "v"
        self._is_in_string = self._is_escaped = False

    def advance(self, text: str, position: int) -> int:
        """Returns the position behind the value, or the end of the text. Raises Unreadable."""
        while position < len(text) and not self.is_complete:
            if self._is_in_string:
                position = self._advance_in_string(text, position)
            else:
                self._take(text[position])
                position += 1
        return position

    def _advance_in_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        match = _JSON_STRING_STOP.search(text, position)
        if match is None:
            return len(text)
        self._is_escaped = match[0] == "\\"
        self._is_in_string = self._is_escaped
        return match.end()

    def _take(self, sign: str) -> None:
        if "s" in self._next:
            if sign.isalnum() or sign in "+-.":
                return
            self._next = ",e"
        if sign in " \t\r\n":
            return
        if sign in "{[" and "v" in self._next:
            self._closers.append(_CLOSERS[sign])
            self._next = "ke" if sign == "{" else "ve"
        elif sign == '"' and self._closers and ("v" in self._next or "k" in self._next):
            self._is_in_string = True
            self._next = ":" if "k" in self._next else ",e"
        elif sign == ":" and self._next == ":":
            self._next = "v"
        elif sign == "," and "," in self._next:
            self._next = "k" if self._closers[-1] == "}" else "v"
        elif "e" in self._next and sign == self._closers[-1]:
            self._closers.pop()
            self._next = ",e"
            self.is_complete = not self._closers
        elif self._closers and "v" in self._next and (sign.isalnum() or sign == "-"):
            self._next = "s"
        else:
            raise Unreadable(f"{sign!r} cannot stand here in JSON")


def _refuse_constant(name: str) -> NoReturn:
    # `json` takes NaN and Infinity, which are no JSON.
    raise ValueError(f"{name} is no JSON value")
