"""python -m outrider.datastore: settings, then serve."""

from __future__ import annotations

import sys
from collections.abc import Callable

from outrider.datastore.settings import DatastoreSettings
from outrider.server.run import Service, launch


def main() -> None:
    """Runs the service until a signal ends it."""
    # Corpora are counted and rings indexed in threads; lookups are not to wait 5 ms for each of their turns.
    sys.setswitchinterval(0.0005)
    launch("datastore", DatastoreSettings, _load)


def _load() -> Callable[[DatastoreSettings], Service]:
    from outrider.datastore.service import DatastoreService

    return DatastoreService


if __name__ == "__main__":
    main()
