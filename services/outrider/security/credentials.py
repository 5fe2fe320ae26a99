"""The file of --credentials: who may call, as whom, and how much.

A JSON list. It has only the SHA-256 of a token, so that reading the file is not enough to get in:

    [{"token_sha256": "9f86...", "tenant": "acme", "roles": ["generate"], "limits": {"num_sessions": 4}},
     {"certificate": "verifier.example", "roles": ["service"]}]
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from outrider.security.callers import DEFAULT_TENANT, NO_LIMITS, Caller, Role, TenantLimits
from outrider.security.watched_files import WatchedFiles

MAX_TENANT_LEN = 256


class LimitsEntry(BaseModel):
    """Limits of a tenant in the file; an absent one means no limit."""

    model_config = ConfigDict(extra="forbid")

    num_sessions: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None


class CredentialEntry(BaseModel):
    """A credential in the file."""

    model_config = ConfigDict(extra="forbid")

    token_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the token as it is sent, in hexadecimal."""
    certificate: Annotated[str, Field(min_length=1)] | None = None
    """Common name, or one of the alternative names, of a client certificate."""
    tenant: Annotated[str, Field(max_length=MAX_TENANT_LEN)] = ""
    roles: Annotated[list[Role], Field(min_length=1)]
    limits: LimitsEntry | None = None

    @model_validator(mode="after")
    def _names_one_caller(self) -> Self:
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("must have token_sha256 or certificate, and not both")
        if self.tenant == DEFAULT_TENANT:
            raise ValueError(f"tenant must not be {DEFAULT_TENANT!r}, the name of those that have none")
        return self


_ENTRIES = TypeAdapter(list[CredentialEntry])


class CredentialBook:
    """Holds all credentials of a file, and looks callers up."""

    def __init__(self, entries: Iterable[CredentialEntry]) -> None:
        """Raises ValueError if entries contradict each other."""
        self._by_digest: dict[bytes, Caller] = {}
        self._by_certificate: dict[str, Caller] = {}
        listed = list(entries)
        limits = _limits_by_tenant(listed)
        for index, entry in enumerate(listed):
            name = entry.token_sha256 or f"certificate {entry.certificate}"
            caller = Caller(name, entry.tenant, frozenset(entry.roles), limits.get(entry.tenant, NO_LIMITS))
            # setdefault returns the older caller if there is one. Two entries may be equal, hence `is`.
            if entry.certificate is not None:
                is_new = self._by_certificate.setdefault(entry.certificate, caller) is caller
            else:
                is_new = self._by_digest.setdefault(bytes.fromhex(name), caller) is caller
            if not is_new:
                raise ValueError(f"entry {index}: its token or certificate has an entry already")

    @property
    def has_certificates(self) -> bool:
        """True if callers may be identified by certificates."""
        return bool(self._by_certificate)

    def with_token(self, token: str) -> Caller | None:
        """Returns the owner of a token. Its duration does not depend on the token."""
        # One round of SHA-256 without salt is enough for the 32 random bytes that `outrider credentials new` makes:
        # unlike passwords they cannot be guessed.
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, caller in self._by_digest.items():
            if hmac.compare_digest(known, digest):
                found = caller  # no break: the time would tell the token's place in the file
        return found

    def with_certificate(self, names: Iterable[str]) -> Caller | None:
        """Returns the owner of a certificate, by the names in it."""
        return next((self._by_certificate[name] for name in names if name in self._by_certificate), None)


def _limits_by_tenant(entries: Iterable[CredentialEntry]) -> dict[str, TenantLimits]:
    """Returns the limits by tenant: they hold for all credentials of a tenant."""
    found: dict[str, TenantLimits] = {}
    for entry in entries:
        if entry.limits is not None:
            limits = TenantLimits(**entry.limits.model_dump())
            if found.setdefault(entry.tenant, limits) != limits:
                raise ValueError(f"the entries of tenant {entry.tenant!r} must not state different limits")
    return found


def credential_book(path: str, *, has_client_certificates: bool) -> WatchedFiles[CredentialBook]:
    """Returns the credentials of a file. Raises UnusableFile.

    Args:
        path: The file.
        has_client_certificates: True if callers show certificates.
    """

    def book_from(contents: Sequence[bytes]) -> CredentialBook:
        try:
            book = CredentialBook(_ENTRIES.validate_json(contents[0]))
        except ValidationError as error:
            # Not the text of the error, which quotes the file.
            problems = (f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors())
            raise ValueError("; ".join(problems)) from None
        if book.has_certificates and not has_client_certificates:
            raise ValueError("entries with a certificate need --tls-client-ca")
        return book

    return WatchedFiles("--credentials", [Path(path)], book_from)
