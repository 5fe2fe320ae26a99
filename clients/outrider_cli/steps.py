"""Shows what a command that starts services is waiting for: a spinner on a terminal, a line for each step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console


class Steps:
    """Shows one step after the other on stderr. A context manager: nothing turns on a terminal after its end."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is where to show them; None means stderr."""
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("starting")

    def show(self, step: str) -> None:
        """Shows what is waited for now."""
        if self._console.is_terminal:
            self._status.update(step)
        else:
            # A log, or a pipe: nobody sees a spinner there, and silence looks like a hang.
            self.say(step)

    def say(self, text: str) -> None:
        """Prints lines that stay, above the step that is shown."""
        self._console.print(text, markup=False)

    def result(self, text: str) -> None:
        """Prints lines to stdout, which may be the same terminal."""
        # The two streams know nothing of each other: what goes to stdout would land in the line of the spinner.
        self._status.stop()
        Console(highlight=False, soft_wrap=True).print(text, markup=False)
        self._status.start()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()
