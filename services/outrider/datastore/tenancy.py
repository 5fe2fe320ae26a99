"""Which tenants a caller may name: its own, unless it speaks for all.

Without credentials a message's word is taken: then whoever reaches this server may name anybody.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.datastore.store import ALL_TENANTS, DEFAULT_TENANT, Scope
from outrider.rpc.errors import PermissionDenied
from outrider.rpc.security.callers import Caller, Role, current_caller


def own_scope(scope: Scope, named: str) -> Scope:
    """The scope, as far as its tokens are the caller's to read and write.

    Args:
        scope: With its defaults in place.
        named: The tenant that the message names; empty = none, which means the caller's own.

    Raises:
        PermissionDenied: it is another's.
    """
    caller = current_caller()
    if caller is None or caller.speaks_for_all:
        return scope
    own = _own_tenant(caller)
    if named not in ("", own):
        raise PermissionDenied(f"scope.tenant must be the caller's own, {own!r}, or unset, got {named!r}")
    return replace(scope, tenant=own)


def check_manages(tenant: str) -> None:
    """Raises PermissionDenied unless the caller may change the prior of a tenant, or with ALL_TENANTS that of all."""
    caller = current_caller()
    if caller is None or caller.speaks_for_all or not caller.tenant or tenant == caller.tenant:
        return
    rule = "the caller's own: the prior of all tenants, and those of others, are not its to change"
    raise PermissionDenied(f"scope.tenant must be {caller.tenant!r}, {rule}, got {tenant!r}")


def may_see(tenant: str) -> bool:
    """Whether the caller may know of what belongs to a tenant, or with ALL_TENANTS to all."""
    caller = current_caller()
    if caller is None or caller.speaks_for_all or tenant == ALL_TENANTS:
        return True
    is_manager_of_all = Role.MANAGE in caller.roles and not caller.tenant
    return is_manager_of_all or tenant == _own_tenant(caller)


def _own_tenant(caller: Caller) -> str:
    return caller.tenant or DEFAULT_TENANT
