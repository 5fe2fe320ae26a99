"""The metrics of a service as it runs: where they are served, and what holds for all services."""

from __future__ import annotations

from collections.abc import Callable

from outrider.rpc.metrics import Metrics, MetricsServer, Read, gauge, gauges
from outrider.rpc.security.watched_files import unusable_flags


class ServiceMetrics:
    """Served from the beginning to the end of the process, also while the service loads and drains."""

    def __init__(self, read: Read, listen: str, is_serving: Callable[[], bool]) -> None:
        """`read` is what the service itself says, `is_serving` what health does; `listen` is HOST:PORT, empty =
        nowhere. Raises SystemExit, naming the flag."""
        self._is_serving = is_serving
        self._read = read
        self._server: MetricsServer | None = None
        if listen:
            try:
                self._server = MetricsServer(listen, self._all)
            except OSError as error:
                raise SystemExit(f"error: --metrics-listen: cannot bind {listen}: {error}") from error

    @property
    def address(self) -> str:
        """Where they are served; empty = nowhere."""
        return "" if self._server is None else self._server.address

    def close(self) -> None:
        """Ends it; takes up to half a second."""
        if self._server is not None:
            self._server.close()

    def _all(self) -> Metrics:
        yield gauge(
            "outrider_serving", "Whether new calls are taken: 0 while the service loads and drains.", self._is_serving()
        )
        yield gauges(
            "outrider_files_unusable",
            "Whether the files of a flag (certificates, keys, tokens, credentials) have changed into what cannot be "
            "used: what was read before is used instead.",
            "flag",
            unusable_flags(),
        )
        yield from self._read()
