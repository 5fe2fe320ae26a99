"""python -m outrider.speculator: settings, then serve."""

from __future__ import annotations

from collections.abc import Callable

from outrider.server.extras import needs_extra

with needs_extra("models"):
    from outrider.server.run import Service, launch
    from outrider.speculator.settings import SpeculatorSettings


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("speculator", SpeculatorSettings, _load)


def _load() -> Callable[[SpeculatorSettings], Service]:
    # Imported only now: the flags have been read, so a wrong one is reported before torch takes seconds to load.
    with needs_extra("models"):
        from outrider.speculator.service import SpeculatorService
    return SpeculatorService


if __name__ == "__main__":
    main()
