"""Structured logs on stderr: an event name and key=value pairs. Prompts, texts and token ids are never logged.

Logging never hurts the work that it reports: a caller of a logger neither waits (`Stderr`) nor fails.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from outrider.telemetry.redaction import without_secrets
from outrider.telemetry.stderr import Stderr, count_dropped_line


def configure_logs(level: str, log_format: str, service: str) -> None:
    """Sets up structlog for this process. `log_format` is "text" or "json"."""
    stderr = sys.stderr
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        # After format_exc_info, which makes a text of the traceback.
        redact,
        renderer,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=_unfailing(structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])),
        logger_factory=lambda *_: _Lines(stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    if isinstance(stderr, Stderr):
        # At any level: the line is written even if only errors are logged.
        every = structlog.make_filtering_bound_logger(logging.NOTSET)
        to_text = structlog.wrap_logger(structlog.ReturnLogger(), processors, every, service=service)
        stderr.notice = lambda num_lines: to_text.warning("log.lines_dropped", num_lines=num_lines) + "\n"


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Removes secrets from every text of an event. A processor of structlog."""
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in event.items()}


class _Lines:
    """Writes structlog's output as lines. Its own loggers hold a lock while they write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Writes a line."""
        self._stream.write(line + "\n")

    debug = info = warning = error = critical = msg


def _unfailing(logger: type[Any]) -> type[Any]:
    """Returns a class of loggers that drop a line if others would raise, for example over a value that cannot be
    formatted."""

    class Unfailing(logger):  # type: ignore[misc]
        def _proxy_to_logger(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super()._proxy_to_logger(*args, **kwargs)
            except Exception:
                count_dropped_line()

    return Unfailing
