"""Who a call comes from, as the credentials say: never as the message says."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import grpc


class Role(Enum):
    """What a caller may do. `outrider.security.permissions` has the methods of each."""

    GENERATE = "generate"
    """Generations, at a verifier."""
    DRAFT = "draft"
    """Drafts, from a speculator."""
    RETRIEVE = "retrieve"
    """Lookups and records, at a datastore."""
    MANAGE = "manage"
    """Prior corpora."""
    SERVICE = "service"
    """All that services ask of each other, on behalf of any tenant."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may take of a verifier; None = as much as there is."""

    num_sessions: int | None = None
    """At a time."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Generated ones."""


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a credential belongs to."""

    name: str = field(repr=False)
    """Distinguishes it from others; for this process alone."""
    tenant: str
    """Empty = none."""
    roles: frozenset[Role]
    limits: TenantLimits = NO_LIMITS

    @property
    def speaks_for_all(self) -> bool:
        """Whether it may name any tenant."""
        return Role.SERVICE in self.roles


_caller: ContextVar[Caller | None] = ContextVar("outrider_caller", default=None)


def current_caller() -> Caller | None:
    """Whom the call that is being served comes from; None = this server asks for no credentials."""
    return _caller.get()


def current_tenant() -> str | None:
    """The tenant of that caller; None means that it has none, or that this server asks for no credentials."""
    caller = current_caller()
    return caller.tenant if caller and caller.tenant else None


def set_current_caller(caller: Caller) -> None:
    """For the call that is being served: each has a context of its own."""
    _caller.set(caller)


def name_of_caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """What tells the callers of a server apart: their credentials, without these their certificates, without those
    their hosts."""
    caller = current_caller()
    if caller is not None:
        return caller.name
    identities = context.peer_identities()
    if identities:
        return b" ".join(identities).decode(errors="replace")
    peer = context.peer()
    return peer if peer.startswith("unix") else peer.rpartition(":")[0]
