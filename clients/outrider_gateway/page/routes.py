"""The files of the page: static ones, and the methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from outrider.core.methods import METHODS
from outrider_gateway.errors import ApiError
from outrider_gateway.exchange import Exchange

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
"""Content types by suffix. Files with other suffixes are not served."""
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def index(exchange: Exchange) -> None:
    """Sends the page itself. Raises ApiError."""
    await _send(exchange, "index.html")


async def file(exchange: Exchange) -> None:
    """Sends a file of the page. Raises ApiError."""
    await _send(exchange, exchange.scope["path_params"]["path"])


def legend() -> bytes:
    """Returns methods.json: what the page shows of each method."""
    methods = METHODS.values()
    return json.dumps([{"name": m.name, "meaning": m.meaning, "colour": m.page_colour} for m in methods]).encode()


async def _send(exchange: Exchange, name: str) -> None:
    content, tag = _read(STATIC, name)
    headers: Mapping[str, str] = {**HEADERS, "content-type": KINDS[Path(name).suffix], "etag": tag}
    status = 200
    if tag in [each.strip() for each in exchange.headers.get("if-none-match", "").split(",")]:
        status, content = 304, b""
    else:
        headers = {**headers, "content-length": str(len(content))}
    fields = [(key.encode(), value.encode()) for key, value in headers.items()]
    await exchange.send({"type": "http.response.start", "status": status, "headers": fields})
    await exchange.send({"type": "http.response.body", "body": content, "more_body": False})


@lru_cache(maxsize=256)
def _read(folder: Path, name: str) -> tuple[bytes, str]:
    """Returns a file and its tag. Raises ApiError if there is none of this name."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()) or path.suffix not in KINDS:
            raise FileNotFoundError
        content = legend() if name == "methods.json" else path.read_bytes()
    except (OSError, ValueError):  # including a name with a zero byte, or one that no file could have
        raise ApiError(404, f"the page has no file {name!r}", code="not_found") from None
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
