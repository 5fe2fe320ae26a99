"""Files are read again when they change, and a broken version changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from outrider.security.certificates import channel_credentials, server_credentials
from outrider.security.credentials import credential_book
from outrider.security.peer_channel import PeerSecurity
from outrider.security.watched_files import UnusableFile, WatchedFiles
from tests.support.certificates import Authority, credentials_file, entry, replaced


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    with capture_logs() as captured:
        yield captured


def number_from(contents: Sequence[bytes]) -> list[int]:
    """A list, so that two of them are different objects."""
    if not contents[0].isdigit():
        raise ValueError("a number was expected")
    return [int(contents[0])]


def test_a_value_is_made_again_when_its_file_changes_and_only_then(tmp_path: Path) -> None:
    file = replaced(tmp_path / "f", b"1")
    watched = WatchedFiles("--flag", [file], number_from)
    first = watched.current()
    assert watched.current() is first
    replaced(file, b"2")
    assert watched.current() == [2]


def test_a_broken_or_missing_version_is_logged_once_and_the_old_one_stays(
    tmp_path: Path, logs: list[EventDict]
) -> None:
    file = replaced(tmp_path / "f", b"1")
    watched = WatchedFiles("--flag", [file], number_from)
    replaced(file, b"secret")
    assert [watched.current() for _ in range(3)] == [[1]] * 3
    file.unlink()
    assert [watched.current() for _ in range(3)] == [[1]] * 3
    assert [event["event"] for event in logs] == ["files.unusable"] * 2
    assert "secret" not in str(logs)
    replaced(file, b"3")
    assert watched.current() == [3]


def test_a_file_that_cannot_be_used_at_the_start_is_an_error_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(UnusableFile, match="--flag: No such file"):
        WatchedFiles("--flag", [tmp_path / "none"], number_from)
    with pytest.raises(UnusableFile, match="--flag: a number was expected"):
        WatchedFiles("--flag", [replaced(tmp_path / "f", b"x")], number_from)


def test_a_key_of_another_certificate_is_found_before_it_is_used(tmp_path: Path) -> None:
    authority = Authority("ca")
    cert, key = authority.issue("one").write(tmp_path, "one")
    _, other = authority.issue("other").write(tmp_path, "other")
    server_credentials(str(cert), str(key))
    with pytest.raises(UnusableFile, match="certificate and key must be PEM, belong together"):
        server_credentials(str(cert), str(other))
    ca = replaced(tmp_path / "ca", authority.pem)
    files = channel_credentials(ca, cert, key)
    before = files.current()
    replaced(key, other.read_bytes())
    assert files.current() is before
    with pytest.raises(UnusableFile, match="a CA file must hold certificates"):
        channel_credentials(key, None, None)


def test_a_token_file_that_is_none_is_refused_without_being_quoted(tmp_path: Path) -> None:
    for content in (b"", b"two tokens", b"\xff\xfe", b"line\nline"):
        file = replaced(tmp_path / "token", content)
        with pytest.raises(UnusableFile, match="--peer-token-file: a token file must hold one token") as error:
            PeerSecurity(token_file=str(file))
        assert "two" not in str(error.value)
    with pytest.raises(UnusableFile) as error:
        PeerSecurity(token_file="the-token-itself")
    assert "the-token-itself" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "valid array"),
        ("[", "Invalid JSON"),
        ('[{"token_sha256": "my-secret-token", "roles": ["generate"]}]', "0.token_sha256: String should match"),
        ('[{"roles": ["generate"]}]', "must have token_sha256 or certificate"),
        ('[{"certificate": "a", "roles": []}]', "0.roles: List should have at least 1"),
        ('[{"certificate": "a", "roles": ["all"]}]', "0.roles.0"),
        ('[{"certificate": "a", "roles": ["service"], "tennant": "x"}]', "0.tennant: Extra inputs"),
        ('[{"certificate": "a", "roles": ["service"]}]', "need --tls-client-ca"),
        ('[{"certificate": "a", "roles": ["generate"], "tenant": "default"}]', "0: Value error, tenant must not be"),
        ('[{"certificate": "a", "roles": ["generate"], "limits": {"num_sessions": 0}}]', "num_sessions"),
    ],
)
def test_a_wrong_credentials_file_is_an_error_that_names_the_place_and_quotes_nothing(
    text: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UnusableFile) as error:
        credential_book(str(replaced(tmp_path / "c", text.encode())), has_client_certificates=False)
    assert problem in str(error.value)
    assert "my-secret-token" not in str(error.value)


def test_a_token_may_stand_in_the_file_once_and_a_tenant_has_one_set_of_limits(tmp_path: Path) -> None:
    file = credentials_file(tmp_path / "c", entry("a", "generate"), entry("a", "service"))
    with pytest.raises(UnusableFile, match="entry 1: its token or certificate has an entry already"):
        credential_book(str(file), has_client_certificates=False)
    one, other = (entry(name, "generate", tenant="acme", num_sessions=n) for n, name in ((1, "a"), (2, "b")))
    file = credentials_file(tmp_path / "c", one, other)
    with pytest.raises(UnusableFile, match="tenant 'acme' must not state different limits"):
        credential_book(str(file), has_client_certificates=False)
    file = credentials_file(tmp_path / "c", one, entry("b", "generate", tenant="acme"))
    book = credential_book(str(file), has_client_certificates=False).current()
    caller = book.with_token("b")
    assert caller is not None
    assert caller.limits.num_sessions == 1
