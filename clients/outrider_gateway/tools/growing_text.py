"""Reads a text while it grows. The result never depends on the pieces in which the text came.

Every method that reads is a generator: it yields where it needs more text, and returns what it has read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Generator
from typing import Any, NoReturn, TypeAlias, TypeVar

_T = TypeVar("_T")

Reading: TypeAlias = Generator[None, None, _T]
"""Yields while the text is too short to decide; returns what was read."""

MAX_JSON_DEPTH = 100
"""Deepest nesting of JSON that is passed on as it comes: every parser takes this much."""

_SPACES = re.compile(r"\s*")
_JSON_SPACES = re.compile(r"[ \t\r\n]*")
_JSON_SCALAR = re.compile(r"[\w+.-]*")
_JSON_PLAIN = re.compile(r'[^"\\]*')
_JSON_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NO_JSON = re.compile(r"[\x00-\x1f\ud800-\udfff]")
"""Characters that must be escaped in a string, as JSON or UTF-8 cannot hold them as they are."""
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
        """Drops what was read. Earlier positions become invalid."""
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
        """Reads as far as a pattern matches. It must be any number of characters of one class."""
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

    def json_spaces(self) -> Reading[str]:
        """Reads the white space that JSON may have between its parts, if any."""
        return (yield from self.run(_JSON_SPACES))

    def before(self, markers: Collection[str], take: Callable[[str], None]) -> Reading[str]:
        """Reads up to the first of some markers, and hands the text before it to `take` as it comes. Returns the
        marker, which is not read yet; "" if the text ends without one."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            match = pattern.search(self.text, self.position)
            start, end = self.position, len(self.text)
            if match:
                end = match.start()
            elif not self.is_over:
                end -= self._num_undecided(markers)
            self.position = end
            # Last: it may forget what was read.
            take(self.text[start:end])
            if match or self.is_over:
                return match[0] if match else ""
            yield

    def _num_undecided(self, markers: Collection[str]) -> int:
        """Counts the characters at the end of the text that may be the beginning of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self.text) - self.position)
        for length in range(longest, 0, -1):
            if any(marker.startswith(self.text[-length:]) for marker in markers):
                return length
        return 0

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
        """Reads a JSON object or array. Raises Unreadable as soon as the text cannot be one."""
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

    def json_string(self) -> Reading[str]:
        """Reads a JSON string without escapes and returns what is in it. Raises Unreadable if another text comes."""
        yield from self.expect('"')
        content = yield from self.run(_JSON_PLAIN)
        yield from self.expect('"')
        if _NO_JSON.search(content):
            raise Unreadable("a plain string must come next")
        return content

    def json_pieces(self, take: Callable[[str], None]) -> Reading[None]:
        """Reads a JSON object or array, and hands its text to `take` as it comes.

        The text passed on is always the beginning of JSON that UTF-8 can hold. `position` stands after it.

        Raises:
            Unreadable: The text does not go on as JSON. The wrong part was not passed on, but may have been read.
        """
        scan = _JsonScan()
        while not scan.is_complete:
            sign = yield from self.ahead()
            if not sign:
                raise Unreadable("the JSON value does not end")
            if scan.is_in_string:
                piece = yield from self._string_piece(sign)
            elif sign.isalnum() or sign == "-":
                piece = yield from self._scalar()
            else:
                piece = sign
                self.position += 1
            scan.advance(piece, 0)
            if scan.depth > MAX_JSON_DEPTH:
                raise Unreadable(f"JSON must not nest deeper than {MAX_JSON_DEPTH}")
            # Models write line breaks in strings as they are.
            take(_NO_JSON.sub(lambda one: json.dumps(one[0])[1:-1], piece) if scan.is_in_string else piece)

    def _string_piece(self, sign: str) -> Reading[str]:
        """Reads the next part of a JSON string, which `sign` begins: its end, an escape sequence, or the plain text so
        far."""
        if sign not in '"\\':
            match = _JSON_PLAIN.match(self.text, self.position)
            assert match is not None, "any number is also none"
            self.position = match.end()
            return match[0]
        start = self.position
        self.position += 1
        if sign == '"':
            return sign
        escaped = yield from self.ahead()
        self.position += 1
        if escaped == "u":
            while len(self.text) < self.position + 4 and not self.is_over:
                yield
            if not _JSON_HEX.match(self.text, self.position):
                raise Unreadable("four hexadecimal digits must come next")
            self.position += 4
        elif not escaped or escaped not in '"\\/bfnrt':
            raise Unreadable(f"{escaped!r} cannot be escaped in JSON")
        return self.text[start : self.position]

    def _scalar(self) -> Reading[str]:
        """Reads a number, or a name like `true`, to its end."""
        scalar = yield from self.run(_JSON_SCALAR)
        try:
            value = json.loads(scalar, parse_constant=_refuse_constant)
        except ValueError as error:
            raise Unreadable(str(error)) from error
        if isinstance(value, float) and not math.isfinite(value):
            raise Unreadable(f"{scalar} is no number that JSON can hold")
        return scalar

    def brackets(self) -> Reading[str]:
        """Reads from a bracket to its partner. Brackets in strings do not count, as in Python. Raises Unreadable if a
        wrong one closes, or none does."""
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
                # Skips the escaped character, which may be a quote. Python has no escapes outside of strings.
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
    """Finds the end of a JSON object or array, character by character, and refuses what is not JSON."""

    def __init__(self) -> None:
        self.is_complete = False
        self._closers: list[str] = []
        # What may come next: v a value, k a key, e the end of what is open, : and , themselves. s: within a scalar.
        self._next = "v"
        self.is_in_string = self._is_escaped = False

    @property
    def depth(self) -> int:
        """The number of brackets that are open."""
        return len(self._closers)

    def advance(self, text: str, position: int) -> int:
        """Returns the position after the value, or the end of the text. Raises Unreadable."""
        while position < len(text) and not self.is_complete:
            if self.is_in_string:
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
        self.is_in_string = self._is_escaped
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
            self.is_in_string = True
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
    # `json` accepts NaN and Infinity, which are no JSON.
    raise ValueError(f"{name} is no JSON value")
