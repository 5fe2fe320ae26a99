"""Shows how a training goes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

LINE_S = 30.0
"""Time between two lines where there is no terminal."""


class Display:
    """Writes to stderr. A context manager: the bar is shown inside."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("the first step", total=1.0)
        self._begun: tuple[float, int, float] | None = None
        self._line_at = 0.0

    def show(self, progress: float, seconds: float, tokens: int, loss: float, accepted: str) -> None:
        """Shows a step.

        Args:
            progress: Share of the training that has passed.
            seconds: Time of the training so far, earlier processes included.
            tokens: Tokens so far, likewise.
            loss: Mean loss of late.
            accepted: Acceptance on what is held out, as last measured.
        """
        # Speed and time left are those of this process: an earlier one may have had another machine.
        first_progress, first_tokens, first_s = self._begun = self._begun or (progress, tokens, seconds)
        passed = seconds - first_s
        rate = f"{(tokens - first_tokens) / passed:.0f} tokens/s" if passed else ""
        left_s = passed / (progress - first_progress) * max(0.0, 1.0 - progress) if progress > first_progress else None
        left = "" if left_s is None else f"{_time(left_s)} left"
        text = "  ".join(filter(None, (f"{tokens} tokens", f"loss {loss:.3f}", accepted, rate, left)))
        self._bar.update(self._task, completed=min(progress, 1.0), description=text)
        if not self._console.is_terminal and time.monotonic() - self._line_at >= LINE_S:
            self._line_at = time.monotonic()
            self.note(f"{progress:4.0%}  {text}")

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(text, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
