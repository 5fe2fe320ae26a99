"""Faults to try on running services, over a Unix socket: a JSON object on a line in each direction.

A gateway's page offers them as buttons, to show that a text goes on. A request names an `action`: `state`,
`kill_speculator`, or `set_delay` with `delay_ms`. The answer is the state after it, or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import LocalStack

AWAY_S = 5.0
"""Seconds for which a killed speculator stays away: long enough to see that the text goes on."""
MAX_DELAY_MS = 1000.0
MAX_LINE_BYTES = 4096
STATE, KILL_SPECULATOR, SET_DELAY = "state", "kill_speculator", "set_delay"


class BadRequest(ValueError):
    """A request cannot be done. The message names the field and the rule."""


class Lab:
    """Carries out requests on the services of a stack."""

    def __init__(self, stack: LocalStack, kill: Callable[[ManagedProcess, float], None]) -> None:
        """
        Args:
            stack: Runs, and may have a link.
            kill: Kills a process, keeps it away for so many seconds, and then restarts it.
        """
        self._stack, self._kill = stack, kill

    def do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out a request, and returns the state. Raises BadRequest, or OSError if the link is gone."""
        actions = self._actions()
        match request.get("action"):
            case "state":
                pass
            case "kill_speculator" if KILL_SPECULATOR in actions:
                for speculator in self._stack.speculators:
                    self._kill(speculator, AWAY_S)
            case "set_delay" if SET_DELAY in actions:
                self._set_delay(request.get("delay_ms"))
            case "set_delay":
                raise BadRequest("action set_delay needs a link: `outrider up --lab`")
            case other:
                raise BadRequest(f"action must be one of {', '.join([STATE, *actions])}, got {other!r}")
        return {"speculator": self._speculator_state(), "delay_ms": self._delay_ms(), "actions": actions}

    def _actions(self) -> list[str]:
        kill = [KILL_SPECULATOR] if self._stack.speculators else []
        return kill + ([SET_DELAY] if self._stack.link is not None else [])

    def _speculator_state(self) -> str | None:
        """Returns "running", "starting" or "killed" for the best of the speculators; None if there is none."""
        if not self._stack.speculators:
            return None
        alive = [speculator for speculator in self._stack.speculators if speculator.is_running]
        if not alive:
            return "killed"
        return "running" if any(speculator.is_serving() for speculator in alive) else "starting"

    def _delay_ms(self) -> float:
        return 0.0 if self._stack.link is None else self._stack.link.report().settings.delay_ms

    def _set_delay(self, delay_ms: Any) -> None:
        assert self._stack.link is not None
        is_number = isinstance(delay_ms, int | float) and not isinstance(delay_ms, bool)
        if not is_number or not 0 <= delay_ms <= MAX_DELAY_MS:
            raise BadRequest(f"delay_ms must be a number in [0, {MAX_DELAY_MS:g}], got {delay_ms!r}")
        self._stack.link.change(delay_ms=float(delay_ms))


class LabSocket:
    """Listens on a Unix socket, which only this user can open, and answers in the thread of a selector."""

    def __init__(self, path: Path, lab: Lab, selector: selectors.BaseSelector) -> None:
        """Listens at once. The selector's owner calls the `data` of each key that is ready."""
        self._lab, self._selector = lab, selector
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: set[socket.socket] = set()
        # Before there is anything to open: a mode that is set afterwards comes too late.
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
        self._listener.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Hangs up on all callers and takes no more."""
        for connection in (self._listener, *self._connections):
            self._selector.unregister(connection)
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # the caller has gone
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._connections.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection, bytearray()))

    def _read(self, connection: socket.socket, received: bytearray) -> None:
        try:
            data = connection.recv(MAX_LINE_BYTES)
            received += data
            while b"\n" in received:
                line, _, rest = bytes(received).partition(b"\n")
                received[:] = rest
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
            is_open = bool(data) and len(received) <= MAX_LINE_BYTES
        except OSError:  # it has gone, or does not read its answers
            is_open = False
        if not is_open:
            self._connections.discard(connection)
            self._selector.unregister(connection)
            connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise BadRequest(f"a request must be a JSON object, got {request!r}")
            return self._lab.do(request)
        except (ValueError, OSError) as error:  # of JSON, of the request, or of the link
            return {"error": str(error)}
