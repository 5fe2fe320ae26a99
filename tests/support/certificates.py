"""Authorities and certificates for tests, good and bad ones."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Writes both files as they are replaced in practice: whole, one after the other."""
        return replaced(folder / f"{name}.crt", self.cert), replaced(folder / f"{name}.key", self.key)


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _certificate(self._name, self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, name: str, *, days: int = 1) -> Pair:
        """A certificate for a name, localhost and 127.0.0.1. A negative `days` means that it expired so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _certificate(_named(name), self._name, key, days).add_extension(
            x509.SubjectAlternativeName(names), False
        )
        cert = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        return Pair(cert, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(NOW + days * DAY)
    )


def replaced(path: Path, content: bytes) -> Path:
    """Replaces a file by another, atomically."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)
    return path


def entry(token: str, *roles: str, tenant: str = "", **limits: float) -> dict[str, object]:
    """An entry of a credentials file."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"token_sha256": digest, "tenant": tenant, "roles": list(roles)} | ({"limits": limits} if limits else {})


def credentials_file(path: Path, *entries: dict[str, object]) -> Path:
    """A credentials file with these entries."""
    return replaced(path, json.dumps(entries).encode())
