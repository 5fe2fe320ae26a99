"""python -m outrider.edge: settings, then serve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider.server.extras import needs_extra

with needs_extra("models"):
    from outrider.edge.settings import EdgeSettings
    from outrider.server.run import Service, freeze_gc, launch


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("edge", EdgeSettings, _load)


def _load() -> Callable[[EdgeSettings], Service]:
    with needs_extra("models"):
        from outrider.edge.service import EdgeService
    return partial(EdgeService, on_loaded=freeze_gc)


if __name__ == "__main__":
    main()
