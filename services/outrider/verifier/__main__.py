"""python -m outrider.verifier: settings, then serve."""

from __future__ import annotations

from collections.abc import Callable

from outrider.server.extras import needs_extra

with needs_extra("models"):
    from outrider.server.run import Service, launch
    from outrider.verifier.settings import VerifierSettings


def main() -> None:
    """Runs the service until a signal ends it."""
    launch("verifier", VerifierSettings, _load)


def _load() -> Callable[[VerifierSettings], Service]:
    # Imports torch. `launch` calls this after checking the settings, so that a wrong flag is reported at once.
    with needs_extra("models"):
        from outrider.verifier.service import VerifierService
    return VerifierService


if __name__ == "__main__":
    main()
