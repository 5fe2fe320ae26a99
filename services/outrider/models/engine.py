"""Whether an engine can do any step at all: an accelerator that has failed once may fail for ever after."""

from __future__ import annotations

import threading

import structlog

from outrider.models.packing import Segment
from outrider.models.runner import Runner

log = structlog.get_logger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that fail before the engine is suspected. Then it shows by a forward of its own what is at fault: one
of its sessions, which says nothing of the others, or itself."""


class Fitness:
    """What an engine has learned of itself. Written by the engine's thread, read by any."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_failed = 0
        self._fault = ""

    def succeeded(self) -> None:
        """A step was done."""
        if self._num_failed:
            self._num_failed, self._fault = 0, ""

    def failed(self) -> None:
        """A step was not done."""
        self._num_failed += 1
        if self._num_failed < MAX_FAILED_STEPS:
            return
        try:
            self._runner.forward([Segment(self._runner.new_cache(1), [0], 1)])
        except Exception as error:
            log.exception("engine.unable", num_failed_steps=self._num_failed)
            self._fault = f"{self._num_failed} steps in a row have failed, the last one with {type(error).__name__}"
        else:
            self.succeeded()

    def fault(self, thread: threading.Thread) -> str:
        """Why nothing can be done any more; empty = it can. `thread`: the engine's, which should live."""
        return self._fault if thread.is_alive() else "the engine's thread has ended"
