"""Addresses are looked at before anything is started there."""

from __future__ import annotations

import socket
from pathlib import Path

from outrider_cli.local.ports import why_taken, why_unreachable
from tests.support.fake_verifier import FakeVerifier


def test_a_free_port_and_any_port_are_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert (why_taken("127.0.0.1", port), why_taken("127.0.0.1", 0)) == ("", "")


def test_a_port_that_something_listens_on_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert why_taken("127.0.0.1", port) == f"port {port} is in use"


def test_a_verifier_is_recognized(verifier: FakeVerifier) -> None:
    port = int(verifier.address.rpartition(":")[2])
    what = f"an outrider verifier serves fake there: outrider chat --address {verifier.address}"
    assert why_taken("127.0.0.1", port) == f"port {port} is in use ({what})"


def test_a_server_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://user:secret@127.0.0.1:{listener.getsockname()[1]}/0"
        assert why_unreachable(url) == ""
        port = listener.getsockname()[1]
        assert why_unreachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/first/0") == ""
    assert why_unreachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/first/0") == "connection refused"
    assert why_unreachable(url) == "connection refused"
    assert why_unreachable(f"unix://{tmp_path}/none.sock") == "no such file or directory"
