"""Controls the process of a link over a Unix socket, with a JSON object on a line in each direction.

A request has the settings to change; one without settings only reads. The answer is a `LinkReport`, or
`{"error": ...}` that names the setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider_cli.links.direction import BadSetting, LinkSettings

TIMEOUT_S = 5.0
UP, CUT, BLACKHOLE = "up", "cut", "blackhole"
STATES = (UP, CUT, BLACKHOLE)
"""UP: everything passes. CUT: connections are dropped and refused. BLACKHOLE: connections stay, nothing passes."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Holds the settings and state of a link, and counts of what has crossed it."""

    settings: LinkSettings
    state: str
    """One of STATES."""
    bytes_up: int
    """Bytes towards the dialled side. A proxy counts TCP payload, a network of packets counts their headers too."""
    bytes_down: int
    num_lost: int
    """Packets that were lost, in both directions."""

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.bytes_up + self.bytes_down


class Link(Protocol):
    """A `Link` can be controlled. It lives in one event loop."""

    async def change(self, changes: dict[str, Any]) -> None:
        """Changes settings, and the state. Raises BadSetting."""

    def report(self) -> LinkReport:
        """Returns its settings, state and counts."""


class LinkControl:
    """Reads and changes a link from outside its process. Blocks, for less than a millisecond."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def report(self) -> LinkReport:
        """Returns the link's settings, state and counts. Raises OSError if its process is gone."""
        return self.change()

    def change(self, **changes: Any) -> LinkReport:
        """Changes settings (names as in `LinkSettings`), and the `state`. Raises BadSetting, OSError."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(self.path))
            connection.sendall(json.dumps(changes).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        # Not json's error about an empty text: callers expect an OSError of a process that is gone.
        if not line:
            raise ConnectionResetError(f"the link at {self.path} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise BadSetting(answer["error"])
        return LinkReport(**answer | {"settings": LinkSettings(**answer["settings"])})


@asynccontextmanager
async def controllable(link: Link, path: Path) -> AsyncIterator[None]:
    """Serves requests about a link at this path while the block runs."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the caller has gone
            while line := await reader.readline():
                writer.write(json.dumps(await _answer_to(link, line)).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield
    finally:
        server.close()
        # From Python 3.13 on asyncio removes the file itself, before that it stays.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


async def _answer_to(link: Link, line: bytes) -> dict[str, Any]:
    try:
        changes = json.loads(line)
        if not isinstance(changes, dict):
            raise BadSetting(f"a request must be a JSON object, got {line.decode(errors='replace').strip()}")
        await link.change(changes)
    except json.JSONDecodeError as error:
        return {"error": f"a request must be JSON ({error.msg})"}
    except BadSetting as error:
        return {"error": str(error)}
    return asdict(link.report())
