"""What this machine has for services: cores that models share, ports that are free, servers that run already.

No process is bound to a core: next to another program that has the same core, it would starve while others idle.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import grpc

from outrider.security.addresses import sentinel_url
from outrider.v1.verifier_pb2 import GetInfoRequest
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub

CONNECT_TIMEOUT_S = 1.0
_ASK_TIMEOUT_S = 0.3
_GROUPS = Path("/sys/fs/cgroup")


class Threads(NamedTuple):
    """Threads of a forward of each model."""

    target: int
    draft: int


def usable_cores(groups: Path = _GROUPS, own_group: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the number of cores that this process may use: those that it is bound to, or fewer if a control group
    gives it less time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *_limits(groups, own_group)]))


def _limits(groups: Path, own_group: Path) -> Iterator[int]:
    """Yields the whole cores for which the control group (version 2), and each group around it, gives time."""
    lines = own_group.read_text().splitlines() if own_group.exists() else []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (groups / own, *(groups / own).parents):
        limit = group / "cpu.max"
        quota, *period = limit.read_text().split() if limit.exists() else ("max",)
        if quota != "max":
            yield int(quota) // int(period[0])
        if group == groups:
            return


def shared_out(num_cores: int, num_targets: int = 1, num_drafts: int = 1) -> Threads:
    """Returns the threads of each model, so that all of them together have a core each.

    Drafts are made while the target computes, and a thread that waits for a core holds up its whole forward. The
    weights that a draft model reads for a few drafted tokens are some quarter of those that its target reads for a
    round.

    Args:
        num_cores: Number of cores, as `usable_cores` counts them.
        num_targets: Processes with the target.
        num_drafts: Processes with the draft model; 0 means that there is none.
    """
    for_drafts = max(num_drafts, num_cores // 4) if num_drafts else 0
    return Threads(
        target=max(1, (num_cores - for_drafts) // num_targets),
        draft=max(1, for_drafts // max(1, num_drafts)),
    )


def why_taken(host: str, port: int) -> str:
    """Returns why nothing can listen at an address, and what listens there, if known; empty means it is free.

    A port of 0 is any free one, and never taken. Takes 0.6 s at most.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # As our servers do: connections of an earlier server in TIME_WAIT are no obstacle.
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
    """Returns which server of Outrider answers at an address, in parentheses; empty if none does."""
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
