"""python -m outrider.edge: settings, then serve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider.edge.settings import EdgeSettings
from outrider.rpc.launching import launch
from outrider.rpc.server import Service, spare_collector


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("edge", EdgeSettings, _load)


def _load() -> Callable[[EdgeSettings], Service]:
    from outrider.edge.service import EdgeService

    return partial(EdgeService, on_loaded=spare_collector)


if __name__ == "__main__":
    main()
