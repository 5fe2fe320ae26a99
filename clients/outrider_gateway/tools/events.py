"""Events of a text in which a model calls tools: text, and calls whose arguments come piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from outrider_gateway.tools.growing_text import GrowingText


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds a call that a model has written."""

    name: str
    """The function to call. It need not be one that the model was offered."""
    arguments: str
    """A JSON object as text, or the beginning of one. It need not fit the function's schema."""
    id: str = ""
    """The model's own name for the call, wherever it stands. Empty with models that give none."""
    is_complete: bool = True
    """False if the text has ended, or gone wrong, within the arguments."""


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Holds the beginning of a call, whose arguments follow."""

    name: str
    id: str = ""
    """The model's own name for the call, if it stands before the arguments; otherwise only `ToolCall` has it."""


@dataclass(frozen=True, slots=True)
class CallGrown:
    """Holds the next piece of the arguments of the call that has begun."""

    arguments: str
    """A part of a JSON object as text; never empty."""


Event: TypeAlias = str | CallBegun | CallGrown | ToolCall
"""A piece of the text around the calls, or a part of a call: its beginning, its arguments piece by piece, and last the
whole call."""


class CallEvents:
    """Collects the events of a text. What a form reads counts once it is accepted, or once a call has begun."""

    def __init__(self, text: GrowingText) -> None:
        self._text = text
        self._events: list[Event] = []
        self._pieces: list[str] = []  # of arguments, not yet an event
        self._arguments: list[str] = []  # of the call that has begun
        self._begun: CallBegun | None = None
        self._waiting: list[ToolCall] = []  # calls that came whole, and do not count yet
        self._has_begun = False
        self._position = 0  # everything read up to here counts

    def take(self) -> list[Event]:
        """Returns the events since the last time."""
        self._tell_arguments()
        events, self._events = self._events, []
        return events

    def add_content(self, content: str) -> None:
        """Adds text around the calls."""
        self._events.append(content)

    def open(self) -> None:
        """Begins a form."""
        self._has_begun, self._waiting = False, []

    def close(self) -> bool:
        """Ends a form that cannot go on; goes back to the end of what counts. Returns False if no call of it has
        begun."""
        if self._has_begun:
            if self._begun:
                self._end(is_complete=False)
            self._text.position = self._position
        return self._has_begun

    def begin(self, name: str, id: str = "") -> None:
        """Begins a call, whose arguments follow."""
        self.accept()
        self._has_begun, self._begun = True, CallBegun(name, id)
        self._events.append(self._begun)
        self._arguments = []

    def grow(self, piece: str) -> None:
        """Adds to the arguments of the call that has begun."""
        if piece:
            self._pieces.append(piece)
            self._arguments.append(piece)
        self._position = self._text.position

    def end(self, id: str = "") -> None:
        """Ends the call that has begun: its arguments are whole. `id`: the id after them, if there is one."""
        self._end(is_complete=True, id=id)

    def wait(self, call: ToolCall) -> None:
        """Adds a call that came whole. It counts once the form is accepted, or once another call begins."""
        self._waiting.append(call)

    def accept(self) -> None:
        """Makes everything that was read count."""
        for call in self._waiting:
            self._events += [CallBegun(call.name, call.id), CallGrown(call.arguments), call]
        self._waiting = []
        self._position = self._text.position

    def _end(self, is_complete: bool, id: str = "") -> None:
        assert self._begun is not None
        self._tell_arguments()
        self._events.append(ToolCall(self._begun.name, "".join(self._arguments), self._begun.id or id, is_complete))
        self._begun = None

    def _tell_arguments(self) -> None:
        if self._pieces:
            self._events.append(CallGrown("".join(self._pieces)))
            self._pieces = []
