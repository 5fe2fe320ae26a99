"""Structured logs on stderr: an event name and key=value pairs. Prompts, texts and token ids are never logged."""

from __future__ import annotations

import logging
import re
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger


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
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


# To the last @: a password may have one that nobody has escaped.
_IN_URL = re.compile(r"(?<=://)[^\s'\"]*@")
_IN_QUERY = re.compile(r"(?<=[?&])(username|password)=[^&\s'\"]*")
_BEARER = re.compile(r"(?i)\bbearer\s+[^\s'\"]+")


def without_secrets(text: str) -> str:
    """A text with *** in place of what stands before the host of a URL, and of bearer tokens."""
    text = _IN_QUERY.sub(r"\1=***", _IN_URL.sub("***@", text))
    return _BEARER.sub("Bearer ***", text)


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """A processor of structlog: the same for every text of an event."""
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in event.items()}
