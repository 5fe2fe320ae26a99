"""The caller of a call, according to its credentials, never to the message."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc

DEFAULT_TENANT = "default"
"""Owner, at a datastore, of what belongs to no tenant. No tenant may therefore have this name."""


class Role(Enum):
    """The permissions of a caller. `outrider.security.permissions` has the methods of each."""

    GENERATE = "generate"
    """Generations, at a verifier."""
    DRAFT = "draft"
    """Drafts, from a speculator."""
    RETRIEVE = "retrieve"
    """Lookups and records, at a datastore."""
    MANAGE = "manage"
    """Prior corpora."""
    SERVICE = "service"
    """All calls between services, on behalf of any tenant."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant at a verifier. None means no limit."""

    num_sessions: int | None = None
    """Sessions at a time."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Generated tokens; prompts are not counted."""


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a credential."""

    name: str = field(repr=False)
    """Distinguishes it from others, within this process only."""
    tenant: str
    """Empty means that it belongs to no tenant."""
    roles: frozenset[Role]
    limits: TenantLimits = NO_LIMITS

    @property
    def speaks_for_all(self) -> bool:
        """True if it may name any tenant."""
        return Role.SERVICE in self.roles


_caller: ContextVar[Caller | None] = ContextVar("outrider_caller", default=None)


def current_caller() -> Caller | None:
    """Returns the caller of the call that is being served. None means that this server asks for no credentials."""
    return _caller.get()


def current_tenant() -> str | None:
    """Returns the tenant of that caller. None means that it has none, or that this server asks for no credentials."""
    caller = current_caller()
    return caller.tenant if caller and caller.tenant else None


def set_current_caller(caller: Caller) -> None:
    """Sets the caller of the call that is being served. Other calls do not see it: each has its own context."""
    _caller.set(caller)


def name_of_caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns a name that distinguishes the callers of a server: by their credentials, otherwise by their certificates,
    otherwise by their hosts."""
    caller = current_caller()
    if caller is not None:
        return caller.name
    identities = context.peer_identities()
    if identities:
        return b" ".join(identities).decode(errors="replace")
    # Connections of one host differ in the port; those of a Unix socket have no port.
    peer = context.peer()
    return peer if peer.startswith("unix") else peer.rpartition(":")[0]
