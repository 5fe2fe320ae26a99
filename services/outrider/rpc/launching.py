"""A service as a process: settings first, then what it needs, then serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from outrider.rpc.logs import configure_logs
from outrider.rpc.security.watched_files import UnusableFile
from outrider.rpc.server import Service, serve
from outrider.rpc.settings import Settings, parse_settings
from outrider.rpc.trace_export import start_traces

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def launch(name: str, settings_class: type[Settings], load: Callable[[], Callable[[Settings], Service]]) -> None:
    """Runs a service until a signal ends it. `name` is what its logs and variables call it.

    `load` returns what makes the service, and imports it first: torch takes seconds, and a wrong flag is told before.
    """
    settings = parse_settings(settings_class)
    configure_logs(settings.log_level, settings.log_format, name)
    pin(settings.cores)
    traces = start_traces(f"outrider-{name}", settings)
    try:
        asyncio.run(_serve(load(), settings))
    except KeyboardInterrupt:  # it came too early for the server, which ends in order
        raise SystemExit(INTERRUPTED) from None
    finally:
        if traces is not None:
            traces.stop()


def pin(cores: set[int]) -> None:
    """Runs this process, threads to come included, on these cores only. Empty = anywhere."""
    if cores:
        os.sched_setaffinity(0, cores)


async def _serve(make: Callable[[Settings], Service], settings: Settings) -> None:
    # Channels belong to the loop in which they are made.
    try:
        service = make(settings)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error
    await serve(service, settings)
