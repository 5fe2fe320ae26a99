"""Checks certificates and their keys before gRPC sees them: gRPC would report only that a handshake failed."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from outrider.security.watched_files import WatchedFiles


def check_ca(pem: bytes) -> None:
    """Raises ValueError if it has no certificates to trust."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError("a CA file must hold certificates in PEM") from None


def check_pair(cert: Path, key: Path) -> None:
    """Raises ValueError unless the files hold a certificate and its key."""
    try:
        # Without a password OpenSSL would ask for one on the terminal, and the service would wait there.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        rule = "certificate and key must be PEM, belong together, and have no passphrase"
        raise ValueError(f"{rule} ({(error.reason or 'unreadable').replace('_', ' ').lower()})") from None


def server_credentials(cert: str, key: str, client_ca: str = "") -> grpc.ServerCredentials:
    """Returns the TLS of a server, from files that are read again for a handshake after they have changed. With a
    client CA, callers must show a certificate that it has signed. Raises UnusableFile."""
    paths = [Path(cert), Path(key), *([Path(client_ca)] if client_ca else [])]

    def configuration(contents: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        # OpenSSL reads a pair from files only. If they are newer than `contents`, they are read again: their signature
        # shows the change.
        check_pair(paths[0], paths[1])
        roots = contents[2] if client_ca else None
        if roots is not None:
            check_ca(roots)
        # gRPC takes the key before the certificate.
        return grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], root_certificates=roots)

    files = WatchedFiles("--tls-cert, --tls-key" + (", --tls-client-ca" if client_ca else ""), paths, configuration)
    known = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificates from this handshake on. None means as before. Called by threads of gRPC."""
        nonlocal known
        # Without a lock: two threads that find the same change both return it, which is harmless.
        current = files.current()
        if current is known:
            return None
        known = current
        return current

    # The documentation allows None, the type stubs do not.
    return grpc.dynamic_ssl_server_credentials(known, changed, bool(client_ca))  # type: ignore[arg-type]


def server_tls(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """Returns the TLS of a server that is not gRPC's. The parameters, and how changed files are taken, are those of
    `server_credentials`. Raises UnusableFile."""
    paths = [Path(cert), Path(key), *([Path(client_ca)] if client_ca else [])]

    def context(contents: Sequence[bytes]) -> ssl.SSLContext:
        check_pair(paths[0], paths[1])
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(cert, key, password="")
        if client_ca:
            check_ca(contents[2])
            made.load_verify_locations(cadata=contents[2].decode("ascii"))
            made.verify_mode = ssl.CERT_REQUIRED
        return made

    files = WatchedFiles("--tls-cert, --tls-key" + (", --tls-client-ca" if client_ca else ""), paths, context)
    first = files.current()

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, known: ssl.SSLContext) -> None:
        """Uses the current certificates for a handshake. Called in each handshake, with a name or without."""
        connection.context = files.current()

    first.sni_callback = renew
    return first


def channel_credentials(ca: Path, cert: Path | None, key: Path | None) -> WatchedFiles[grpc.ChannelCredentials]:
    """Returns the TLS of channels: a new object whenever the files have changed. Raises UnusableFile."""
    pair = (cert, key) if cert is not None and key is not None else None

    def credentials(contents: Sequence[bytes]) -> grpc.ChannelCredentials:
        check_ca(contents[0])
        if pair is None:
            return grpc.ssl_channel_credentials(contents[0])
        check_pair(*pair)
        # Again the key before the certificate.
        return grpc.ssl_channel_credentials(contents[0], contents[2], contents[1])

    flag = "--peer-ca" if pair is None else "--peer-ca, --peer-cert, --peer-key"
    return WatchedFiles(flag, [ca, *(pair or ())], credentials)
