"""Which addresses may be dialled and listened on in plaintext, and how a service reports one that may not."""

from __future__ import annotations

import pytest

from outrider.datastore.settings import DatastoreSettings
from outrider.edge.settings import EdgeSettings
from outrider.security.addresses import is_loopback, is_redis_url, sentinel_url
from outrider.server.settings import ServiceSettings, parse_settings
from outrider.telemetry.redaction import without_secrets
from outrider.verifier.settings import VerifierSettings

HERE = [
    "127.0.0.1:50051",
    "127.8.9.10:1",
    "localhost:50051",
    "[::1]:50051",
    "::1",
    "unix:/run/outrider.sock",
    "unix:///run/outrider.sock",
    "unix-abstract:outrider",
    "dns:localhost:1",
    "dns:///localhost:1",
    "ipv4:127.0.0.1:1,127.0.0.2:2",
    "ipv6:[::1]:1",
]
ELSEWHERE = [
    "0.0.0.0:50051",
    "[::]:50051",
    "10.0.0.2:50051",
    "verifier:50051",
    "localhost.example:1",
    "127.0.0.1.example:1",
    "dns:///127.0.0.1.example:1",
    "dns://10.0.0.1/verifier:1",
    "dns:///verifier:1",
    "dns://127.0.0.1:5353/verifier:1",
    "dns://8.8.8.8/localhost:50051",
    "dns://8.8.8.8/127.0.0.1:50051",
    "dns://127.0.0.1:5353/localhost:50051",
    "ipv4:127.0.0.1:1,10.0.0.2:2",
    "[fe80::1]:1",
    "user@127.0.0.1@10.0.0.2:1",
    "xds:///localhost",
    "",
    "[",
]


@pytest.mark.parametrize("address", HERE)
def test_these_never_leave_the_machine(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ELSEWHERE)
def test_these_may(address: str) -> None:
    assert not is_loopback(address)


def complaint(cls: type[ServiceSettings], line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A service's refusal of its flags: one line, status 2."""
    with pytest.raises(SystemExit) as ended:
        parse_settings(cls, line.split())
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--listen 0.0.0.0:1", ("--listen", "--tls-cert", "--insecure")),
        ("--tls-cert a", ("--tls-cert", "--tls-key")),
        ("--tls-key a", ("--tls-cert", "--tls-key")),
        ("--tls-client-ca a", ("--tls-client-ca", "--tls-cert")),
        ("--tls-cert a --tls-key b --insecure", ("--insecure", "--tls-cert")),
        ("--health-listen nowhere", ("--health-listen", "HOST:PORT")),
        ("--speculator 10.0.0.2:1", ("--speculator", "--peer-ca", "--peer-insecure")),
        ("--datastore datastore:1 --peer-token-file t", ("--datastore", "--peer-ca", "--peer-insecure")),
        ("--speculator dns:///speculator:1", ("--speculator", "--peer-ca", "--peer-insecure")),
        ("--datastore dns://127.0.0.1:53/datastore:1", ("--datastore", "--peer-ca", "--peer-insecure")),
        ("--peer-cert a", ("--peer-cert", "--peer-key")),
        ("--peer-cert a --peer-key b", ("--peer-cert", "--peer-ca")),
        ("--peer-ca a --peer-insecure", ("--peer-insecure", "--peer-ca")),
    ],
)
def test_what_is_not_safe_or_makes_no_sense_is_refused_in_one_line(
    line: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = complaint(VerifierSettings, line, capsys)
    assert all(flag in text for flag in named), text


@pytest.mark.parametrize(
    "line",
    [
        "--listen 0.0.0.0:1 --insecure",
        "--listen 0.0.0.0:1 --tls-cert a --tls-key b --tls-client-ca c",
        "--speculator 10.0.0.2:1 --datastore 10.0.0.3:1 --peer-ca a",
        "--speculator 10.0.0.2:1 --peer-insecure",
        "--speculator dns:///x:50052 --datastore dns://127.0.0.1:5353/x:50053 --peer-insecure",
        "--speculator dns:///x:50052 --peer-ca a --max-connection-age-s 0",
        "--speculator 127.0.0.1:1 --datastore localhost:1 --peer-token-file t",
        "--health-listen 0.0.0.0:8080",
    ],
)
def test_what_was_asked_for_is_allowed(line: str) -> None:
    parse_settings(VerifierSettings, line.split())


@pytest.mark.parametrize("upstream", ["dns:///x:50051", "dns://127.0.0.1:5353/x:50051", "dns:///x:50051,y:50051"])
def test_an_edge_may_dial_all_that_a_name_means(upstream: str) -> None:
    assert parse_settings(EdgeSettings, ["--upstream", upstream, "--peer-insecure"]).upstreams == upstream.split(",")


@pytest.mark.parametrize(
    "line",
    [
        "--redis-url http://:s3cret@h:1/0",
        "--redis-url redis://:s3/cret@h:1/0",
        "--redis-ulr redis://:s3cret@h:1/0",
        "--redis-url redis://:s3cret@h:1/0 --tls-cert a",
        "--max-num-queries redis://user:s3cret@h:1",
        "--log-level redis://h/?password=s3cret",
        "--redis-url redis://:p@s3cret@h:port",
        "--redis-url redis+sentinel://:s3cret@h:1,h:2",
        "--redis-url redis+sentinel://h:port/first?sentinel_password=s3cret",
    ],
)
def test_no_complaint_shows_a_password(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(DatastoreSettings, line, capsys)
    assert "s3" not in text
    assert "cret" not in text


def test_help_shows_no_password(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DATASTORE_REDIS_URL", "redis://:s3cret@h:1/0")
    with pytest.raises(SystemExit):
        parse_settings(DatastoreSettings, ["--help"])
    assert "s3cret" not in capsys.readouterr().out
    assert "s3cret" not in repr(parse_settings(DatastoreSettings, []))


def test_a_url_may_name_sentinels() -> None:
    named = sentinel_url("rediss+sentinel://me:p%40ss@a:1,[::1]:2,c/first/3?sentinel_password=x")
    assert named == ((("a", 1), ("::1", 2), ("c", 26379)), "first", "rediss://me:p%40ss@sentinel/3?sentinel_password=x")
    assert sentinel_url("redis+sentinel://a/first") == ((("a", 26379),), "first", "redis://sentinel/0?")
    assert sentinel_url("redis://a:1/0") is None
    assert is_redis_url("redis+sentinel://a:1,b:2/first/0")


@pytest.mark.parametrize(
    "rest", ["", "a:1", "a:1/", "a:1,/first", "a:0/first", "a:x/first", "a/first/x", "a/first/1/2"]
)
def test_what_names_no_sentinel_or_no_service_is_refused(rest: str) -> None:
    assert not is_redis_url(f"redis+sentinel://{rest}")


def test_texts_lose_their_secrets_and_nothing_else() -> None:
    plain = "cannot reach 10.0.0.1:6379 (redis://cache:6379/0): ask ops@example.org"
    assert without_secrets(plain) == plain
    assert without_secrets("redis://u:p@ss@h/0?password=x&sentinel_password=y&db=1 authorization: Bearer abc.def") == (
        "redis://***@h/0?password=***&sentinel_password=***&db=1 authorization: Bearer ***"
    )
