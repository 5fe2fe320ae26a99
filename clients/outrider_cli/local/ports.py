"""Looks at addresses before anything is started there: ports that are taken, servers that are not there."""

from __future__ import annotations

import errno
import json
import socket
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import grpc

from outrider.security.addresses import sentinel_url
from outrider.v1.verifier_pb2 import GetInfoRequest
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub

CONNECT_TIMEOUT_S = 1.0
_ASK_TIMEOUT_S = 0.3


def why_taken(host: str, port: int) -> str:
    """Returns why nothing else can listen at an address, and who does as far as one sees; empty means it is free.

    A port of 0 is any free one, and never taken. Takes 0.6 s at most.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # As our servers do: connections of an earlier one that are still being forgotten are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"port {port} cannot be used ({_words(error)})"
        else:
            return ""
    return f"port {port} is in use{_told_of(f'{host}:{port}')}"


def why_unreachable(url: str) -> str:
    """Returns why no server accepts connections at a URL of Redis, or none of its Sentinels; empty if one does."""
    if (named := sentinel_url(url)) is not None:
        reasons = [why_unreachable(f"redis://{host}:{port}") for host, port in named.sentinels]
        return reasons[-1] if all(reasons) else ""
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                connection.connect(parts.path)
        else:
            socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return _words(error)
    return ""


def _words(error: OSError) -> str:
    """Returns the reason of an error in a few words of lower case, without its number."""
    return (error.strerror or str(error)).lower()


def _told_of(address: str) -> str:
    """Returns what of ours answers at an address, in parentheses; empty if nothing does."""
    with suppress(grpc.RpcError), grpc.insecure_channel(address) as channel:
        info = VerifierServiceStub(channel).GetInfo(GetInfoRequest(), timeout=_ASK_TIMEOUT_S)
        return f" (an outrider verifier serves {info.model.model_id} there: outrider chat --address {address})"
    with suppress(OSError, HTTPException, ValueError, LookupError, TypeError):
        with closing(HTTPConnection(address, timeout=_ASK_TIMEOUT_S)) as connection:
            connection.request("GET", "/v1/models")
            first = json.loads(connection.getresponse().read())["data"][0]
        if first["owned_by"] == "outrider":
            return f" (an outrider gateway serves {first['id']} there)"
    return ""
