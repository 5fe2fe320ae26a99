"""python -m outrider.edge: settings, then serve."""

from __future__ import annotations

import asyncio

from outrider.edge.service import EdgeService
from outrider.edge.settings import EdgeSettings
from outrider.rpc.logs import configure_logs
from outrider.rpc.security.watched_files import UnusableFile
from outrider.rpc.server import pin, serve, spare_collector
from outrider.rpc.settings import parse_settings


def main() -> None:
    """Runs the service until a signal ends it."""
    settings = parse_settings(EdgeSettings)
    configure_logs(settings.log_level, settings.log_format, "edge")
    pin(settings.cores)
    asyncio.run(_serve(settings))


async def _serve(settings: EdgeSettings) -> None:
    # Channels belong to the loop in which they are made.
    try:
        service = EdgeService(settings, on_loaded=spare_collector)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error
    await serve(service, settings)


if __name__ == "__main__":
    main()
