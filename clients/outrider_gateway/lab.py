"""The page's laboratory: breaks things under `outrider up`, through its Unix socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from outrider_gateway.errors import ApiError, invalid, shown
from outrider_gateway.exchange import Exchange
from outrider_gateway.sites import check_host, check_origin

TIMEOUT_S = 10.0
ACTIONS = ("kill_speculator", "set_delay")


async def lab_state(exchange: Exchange) -> None:
    """Answers with what can be broken here, and what is broken. Raises ApiError."""
    if not exchange.settings.lab_socket:
        return await exchange.answer({"actions": []})
    return await exchange.answer(await _asked(exchange.settings.lab_socket, {"action": "state"}))


async def lab_action(exchange: Exchange) -> None:
    """Breaks something. Allowed only for a page of this gateway on this machine. Raises ApiError."""
    if not exchange.settings.lab_socket:
        raise ApiError(404, "there is nothing to break here: no --lab-socket", code="not_found")
    # Others may be allowed to use the gateway, but not to break it.
    check_host(exchange.headers)
    check_origin(exchange.headers)
    await exchange.answer(await _asked(exchange.settings.lab_socket, _action(await exchange.body())))


def _action(given: Mapping[str, Any]) -> dict[str, Any]:
    action, delay = given.get("action"), given.get("delay_ms")
    if action not in ACTIONS:
        raise invalid("action", f"must be one of {', '.join(ACTIONS)}, got {shown(action)}")
    if unknown := given.keys() - {"action", "delay_ms"}:
        raise invalid(min(unknown), "is not supported", code="unsupported_parameter")
    if action != "set_delay":
        return {"action": action}
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay <= 1000:
        raise invalid("delay_ms", f"must be in [0, 1000], got {shown(delay)}")
    return {"action": action, "delay_ms": delay}


async def _asked(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state after a request to the socket. Raises ApiError."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                state = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise ApiError(503, f"outrider up does not answer: {error}", code="unavailable") from None
    if "error" in state:
        raise ApiError(409, str(state["error"]), code="failed")
    return {"actions": list(ACTIONS), **state}
