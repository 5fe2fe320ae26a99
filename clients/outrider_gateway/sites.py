"""Checks which sites' pages may use the gateway. A browser sends the name by which it found a server, and the page's
origin.

A name that another site has pointed at this machine is refused (DNS rebinding). A page of another origin may send much
without a CORS preflight, though it cannot read the answers.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from outrider.security.addresses import host_of, is_address, is_loopback_host
from outrider_gateway.errors import ApiError
from outrider_gateway.settings import GatewaySettings


def check_site(headers: Headers, settings: GatewaySettings) -> None:
    """Raises ApiError for a request to a name that is not the gateway's, or from a page that may not use it."""
    is_local = is_loopback_host(host_of(settings.listen))
    if is_local or settings.allowed_hosts:
        check_host(headers, settings.allowed_hosts, allows_addresses=not is_local)
    check_origin(headers, settings.allowed_origins)


def check_host(headers: Headers, allowed: Collection[str] = (), *, allows_addresses: bool = False) -> None:
    """Raises ApiError unless the request names the server by a name of this machine, or by an allowed one.

    Args:
        headers: Headers of the request.
        allowed: More names; * = all.
        allows_addresses: True to allow IP addresses, which cannot be pointed at another machine.
    """
    # A client of HTTP/1.0 may name no host, and is not a browser.
    if (given := headers.get("host")) is None or "*" in allowed:
        return
    host = host_of(given)
    if is_loopback_host(host) or host in allowed or (allows_addresses and is_address(host)):
        return
    message = f"{given} is no name of this gateway: --allow-host has those by which it may be asked, beside localhost"
    raise ApiError(403, message, code="permission_denied")


def check_origin(headers: Headers, allowed: Collection[str] = ()) -> None:
    """Raises ApiError for a page of another origin than the gateway's, unless it is allowed. `allowed`: * = all."""
    origin, host = headers.get("origin"), headers.get("host")
    if origin is None or origin in allowed or "*" in allowed or (host is not None and _host(origin) == host):
        return
    message = f"pages of {origin} may not use this gateway: --allow-origin has those that may, beside its own"
    raise ApiError(403, message, code="permission_denied")


def _host(origin: str) -> str | None:
    """Returns HOST:PORT of an origin; None if it has none."""
    try:
        url = urlsplit(origin)
    except ValueError:
        return None
    return url.netloc if url.scheme in ("http", "https") else None
