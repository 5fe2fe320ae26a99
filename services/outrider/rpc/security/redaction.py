"""Takes passwords out of what people may read: logs, and complaints about settings."""

from __future__ import annotations

import re

from structlog.typing import EventDict, WrappedLogger

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
