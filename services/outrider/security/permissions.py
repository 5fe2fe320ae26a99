"""Roles that may call each method. No role may call a method that is not listed here."""

from __future__ import annotations

from outrider.security.callers import Role

_GENERATE = frozenset({Role.GENERATE})
_VERIFIER_INFO = frozenset({Role.GENERATE, Role.MANAGE, Role.SERVICE})
_DRAFT = frozenset({Role.DRAFT, Role.SERVICE})
_RETRIEVE = frozenset({Role.RETRIEVE, Role.SERVICE})
_MANAGE = frozenset({Role.MANAGE, Role.SERVICE})

PERMISSIONS: dict[str, frozenset[Role] | None] = {
    "/outrider.v1.VerifierService/Generate": _GENERATE,
    "/outrider.v1.VerifierService/Collaborate": _GENERATE,
    "/outrider.v1.VerifierService/Tokenize": _GENERATE,
    "/outrider.v1.VerifierService/Detokenize": _GENERATE,
    "/outrider.v1.VerifierService/GetInfo": _VERIFIER_INFO,
    "/outrider.v1.SpeculatorService/Speculate": _DRAFT,
    "/outrider.v1.SpeculatorService/GetInfo": _DRAFT,
    "/outrider.v1.DatastoreService/Lookup": _RETRIEVE,
    "/outrider.v1.DatastoreService/Record": _RETRIEVE,
    "/outrider.v1.DatastoreService/Watch": _RETRIEVE,
    "/outrider.v1.DatastoreService/LoadPrior": _MANAGE,
    "/outrider.v1.DatastoreService/DeleteCorpus": _MANAGE,
    "/outrider.v1.DatastoreService/ListCorpora": _RETRIEVE | _MANAGE,
    "/outrider.v1.DatastoreService/GetInfo": _RETRIEVE | _MANAGE,
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": None,
}
"""Roles by full method. None means every role that may call any method of the server's main service."""


def permitted_roles(method: str, service: str) -> frozenset[Role]:
    """Returns the roles that may call a method of a server.

    Args:
        method: "/package.Service/Method".
        service: Full name of the server's main service.
    """
    roles = PERMISSIONS.get(method, frozenset())
    if roles is not None:
        return roles
    own = (roles for name, roles in PERMISSIONS.items() if name.startswith(f"/{service}/"))
    return frozenset().union(*(roles for roles in own if roles is not None))
