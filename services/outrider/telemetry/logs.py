"""Structured logs on stderr: an event name and key=value pairs. Prompts, texts and token ids are never logged."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger

from outrider.telemetry.redaction import without_secrets


def configure_logs(level: str, log_format: str, service: str) -> None:
    """Sets up structlog for this process. `log_format` is "text" or "json"."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            # After format_exc_info, which has made a text of the traceback by then.
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Removes secrets from every text of an event. A processor of structlog."""
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in event.items()}
