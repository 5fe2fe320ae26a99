"""Tokens, certificates and plaintext, as the clients and the command take them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from outrider.v1 import verifier_pb2_grpc
from outrider_cli.app import app
from outrider_client.blocking import BlockingClient
from outrider_client.channel import ChannelSecurity
from outrider_client.client import Client
from outrider_client.errors import Unavailable
from tests.support.certificates import Authority, replaced
from tests.support.fake_verifier import FakeVerifier

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


class Recording(grpc.ServerInterceptor):  # type: ignore[misc]
    """Remembers the authorization of every call."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        self.seen.append(dict(details.invocation_metadata).get("authorization"))
        return continuation(details)


@dataclass
class Secured:
    """A verifier that requires mTLS, and the files to reach it with."""

    address: str
    files: dict[str, Path]
    recording: Recording


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    authority = Authority("ca")
    pair = authority.issue("server")
    credentials = grpc.ssl_server_credentials([(pair.key, pair.cert)], authority.pem, require_client_auth=True)
    recording = Recording()
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[recording])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(FakeVerifier(), server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    cert, key = authority.issue("client").write(tmp_path, "client")
    ca = replaced(tmp_path / "ca", authority.pem)
    yield Secured(address, {"ca_file": ca, "cert_file": cert, "key_file": key}, recording)
    server.stop(None)


async def test_both_clients_show_their_token_and_certificate(secured: Secured) -> None:
    with BlockingClient(secured.address, token="one", **secured.files) as blocking:  # type: ignore[arg-type]
        assert blocking.info().version == "1"
        assert blocking.complete("x").text == "a b c d"
    async with Client(secured.address, token="two", **secured.files) as client:  # type: ignore[arg-type]
        assert (await client.info()).version == "1"
        assert (await client.complete("x")).text == "a b c d"
    assert secured.recording.seen == ["Bearer one"] * 2 + ["Bearer two"] * 2


async def test_a_view_for_a_caller_shows_its_token_on_the_same_connection(secured: Secured) -> None:
    own = (("authorization", "Bearer mine"), ("x-team", "a"))
    async with Client(secured.address, metadata=own, **secured.files) as client:  # type: ignore[arg-type]
        async with client.for_caller("theirs") as view:
            assert (await view.complete("x")).text == "a b c d"
        assert (await client.for_caller("").info()).version == "1"
        # Leaving the view closes nothing.
        assert (await client.for_caller("others").complete("x")).text == "a b c d"
        assert (await client.info()).version == "1"
        assert view._replicas is client._replicas
        with pytest.raises(ValueError, match="token"):
            client.for_caller("two\nlines")
    assert secured.recording.seen == ["Bearer theirs", None, "Bearer others", "Bearer mine"]
    with BlockingClient(secured.address, token="one", **secured.files) as blocking:  # type: ignore[arg-type]
        with blocking.for_caller("two") as blocking_view:
            assert blocking_view.info().version == "1"
        assert blocking.info().version == "1"
    assert secured.recording.seen[-2:] == ["Bearer two", "Bearer one"]


def test_without_a_certificate_nobody_answers(secured: Secured) -> None:
    with BlockingClient(secured.address, ca_file=secured.files["ca_file"]) as client, pytest.raises(Unavailable):
        client.info(timeout_s=5)


def test_the_command_takes_files_from_flags_and_variables(secured: Secured, tmp_path: Path) -> None:
    token = replaced(tmp_path / "token", b"from a file\n".replace(b" ", b"-"))
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in secured.files.items()]
    line = ["info", "--address", secured.address, *flags, f"--token-file={token}"]
    result = runner.invoke(app, line)
    assert result.exit_code == 0, result.output
    variables = {f"OUTRIDER_{name.upper()}": str(path) for name, path in secured.files.items()}
    variables["OUTRIDER_TOKEN_FILE"] = str(token)
    result = runner.invoke(app, ["generate", "x", "--plain", "--address", secured.address], env=variables)
    assert result.exit_code == 0, result.output
    assert result.stdout == "a b c d\n"
    assert set(secured.recording.seen) == {"Bearer from-a-file"}


@pytest.mark.parametrize(
    "line",
    ["info", "generate x", "chat", "prior list", "prior list --datastore 10.0.0.9:1", "prior delete x", "bench pair"],
)
def test_no_command_talks_in_plaintext_to_another_machine(line: str) -> None:
    flags = line.split() if "--datastore" in line else [*line.split(), "--address", "10.0.0.2:1"]
    result = runner.invoke(app, flags)
    assert result.exit_code == 2
    assert "is not on this machine: --ca-file is needed for TLS, or --insecure" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "generate",
        "chat",
        "bench generate",
        *(f"prior {name}" for name in ("build", "load", "list", "delete")),
    ],
)
def test_every_command_that_talks_to_a_server_has_the_flags(command: str) -> None:
    text = runner.invoke(app, [*command.split(), "--help-all"]).stdout
    for name in ("token-file", "ca-file", "cert-file", "key-file", "insecure"):
        assert f"--{name}" in text
    for name in ("TOKEN_FILE", "CA_FILE", "CERT_FILE", "KEY_FILE"):
        assert f"OUTRIDER_{name}" in text


def test_a_token_given_in_place_of_its_file_is_not_shown() -> None:
    result = runner.invoke(app, ["info", "--token-file", "the-token-itself"])
    assert result.exit_code == 2
    assert "--token-file: No such file" in result.stderr
    assert "the-token-itself" not in result.output


async def test_plaintext_to_another_machine_must_be_asked_for() -> None:
    for kind in (Client, BlockingClient):
        with pytest.raises(ValueError, match="is not on this machine"):
            kind("10.0.0.2:50051")
        with pytest.raises(ValueError, match="is not on this machine"):
            kind("10.0.0.2:50051", token="secret")
    async with Client("10.0.0.2:50051", insecure=True):
        pass
    with BlockingClient("10.0.0.2:50051", credentials=grpc.ssl_channel_credentials()):
        pass


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"cert_file": "a"}, "one needs the other"),
        ({"cert_file": "a", "key_file": "b"}, "cert_file needs ca_file"),
        ({"ca_file": "a", "insecure": True}, "insecure means without TLS"),
        ({"ca_file": "a", "credentials": grpc.ssl_channel_credentials()}, "only one of them"),
        ({"token": "two words"}, "token must be one word, in ASCII"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as error:
        ChannelSecurity(**options)  # type: ignore[arg-type]
    assert "two words" not in str(error.value)


def test_nobody_sees_the_token_of_a_printed_value() -> None:
    assert "secret" not in repr(ChannelSecurity(token="secret"))
