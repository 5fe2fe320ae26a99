"""python -m outrider.edge: settings, then serve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from outrider.server.extras import needs_extra

with needs_extra("models"):
    from outrider.edge.settings import EdgeSettings
    from outrider.server.process import freeze_gc
    from outrider.server.run import Service, launch


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("edge", EdgeSettings, _load)


def _load() -> Callable[[EdgeSettings], Service]:
    with needs_extra("models"):
        from outrider.edge.service import EdgeService

        # Torch itself is imported when the port is already served, too late to end the process if it is missing.
        version("torch")
    # `serve` freezes when `EdgeService.load` returns, before the model is loaded: frozen again after that. Lines after
    # the address, for the program that started this process.
    return partial(EdgeService, on_loaded=freeze_gc, announce=partial(print, flush=True))


if __name__ == "__main__":
    main()
