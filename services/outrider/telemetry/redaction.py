"""Removes secrets from texts that are shown: logs, errors, the addresses that a command prints."""

from __future__ import annotations

import re

# To the last @: a password may contain one that is not escaped.
_IN_URL = re.compile(r"(?<=://)[^\s'\"]*@")
# redis-py also takes name and password from the query of a URL, and those of Sentinels are always there.
_IN_QUERY = re.compile(r"(?<=[?&])((?:sentinel_)?(?:username|password))=[^&\s'\"]*")
_BEARER = re.compile(r"(?i)\bbearer\s+[^\s'\"]+")


def without_secrets(text: str) -> str:
    """Returns a text with *** in place of the credentials in URLs, and of bearer tokens."""
    text = _IN_QUERY.sub(r"\1=***", _IN_URL.sub("***@", text))
    return _BEARER.sub("Bearer ***", text)
