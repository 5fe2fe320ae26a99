"""Runs the datastore: python -m outrider.datastore [--listen ...] [--redis-url ...]."""

from __future__ import annotations

from collections.abc import Callable

from outrider.server.extras import needs_extra

with needs_extra("datastore"):
    from outrider.datastore.settings import DatastoreSettings
    from outrider.server.run import Service, launch


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("datastore", DatastoreSettings, _load)


def _load() -> Callable[[DatastoreSettings], Service]:
    with needs_extra("datastore"):
        from outrider.datastore.service import DatastoreService
    return DatastoreService


if __name__ == "__main__":
    main()
