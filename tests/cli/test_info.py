"""`outrider info`: a verifier, or each of its replicas."""

from __future__ import annotations

import json

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.v1 import types_pb2, verifier_pb2
from outrider_cli.app import app
from tests.support.fake_verifier import FakeVerifier

NO_SERVER = "127.0.0.1:1"

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def test_info_shows_what_the_server_is(verifier: FakeVerifier) -> None:
    result = runner.invoke(app, ["info", "--address", verifier.address])
    assert result.exit_code == 0
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["model"].strip() == "fake"
    assert lines["speculator"].strip() == "127.0.0.1:1 (not connected: no answer)"
    assert lines["datastore"].strip() == "none"


def test_info_shows_the_sampling_that_counts_where_a_request_says_nothing(verifier: FakeVerifier) -> None:
    def shown() -> str:
        lines = runner.invoke(app, ["info", "--address", verifier.address]).stdout.splitlines()
        return dict(line.split(None, 1) for line in lines)["sampling"]

    assert shown() == "temperature 1 where a request says nothing"
    verifier.default_sampling = types_pb2.SamplingParams(temperature=0.6, top_k=20, max_tokens=2048)
    own = "temperature 0.6, top_k 20, max_tokens 2048"
    assert shown() == f"{own} where a request says nothing (the model's generation_config.json)"


def test_info_shows_the_state_and_the_load_of_each_speculator(verifier: FakeVerifier) -> None:
    verifier.speculators = [
        verifier_pb2.PeerInfo(
            address="a:1", connected=True, num_own_sessions=2, num_sessions=5, max_num_sessions=64, busy_percent=40
        ),
        verifier_pb2.PeerInfo(address="b:2", last_error="no answer"),
    ]
    result = runner.invoke(app, ["info", "--address", verifier.address])
    assert result.exit_code == 0
    shown = [line.strip() for line in result.stdout.splitlines()]
    assert "speculator          a:1 (connected; 5 of 64 sessions, 2 of them ours, 40 % busy)" in shown
    assert "b:2 (not connected: no answer)" in shown


def test_info_shows_what_is_wrong_with_a_peer_that_answers(verifier: FakeVerifier) -> None:
    verifier.speculators = [verifier_pb2.PeerInfo(address="a:1", connected=True, last_error="it takes nothing")]
    assert "a:1 (connected; it takes nothing)" in invoked(verifier).stdout


@pytest.mark.slow
def test_replicas_that_are_gone_are_passed_over(verifier: FakeVerifier) -> None:
    replicas = f"{NO_SERVER},{verifier.address}"
    result = runner.invoke(app, ["generate", "hello", "--plain", "--address", replicas])
    assert (result.exit_code, result.stdout) == (0, "a b c d\n")
    result = runner.invoke(app, ["info", "--address", replicas])
    assert result.exit_code == 0
    assert f"address  {NO_SERVER}\nstate    UNAVAILABLE" in result.stdout
    assert "fake" in result.stdout
    result = runner.invoke(app, ["info", "--address", f"{NO_SERVER},127.0.0.1:2"])
    assert result.exit_code == 3
    assert "cannot reach a verifier at" in result.stderr


def test_info_shows_what_some_forwards_cost_in_one_line_and_all_in_json(verifier: FakeVerifier) -> None:
    verifier.forward_times = {1: 20.0, 2: 20.5, 8: 23.04, 16: 30.0}
    line = next(each for each in invoked(verifier).stdout.splitlines() if each.startswith("forward"))
    assert line.split(None, 1)[1].strip() == "20.0 ms (1 row), 23.0 ms (8 rows), 30.0 ms (16 rows)"
    found = json.loads(invoked(verifier, "--json").stdout)
    assert (found["address"], found["model"]["model_id"]) == (verifier.address, "fake")
    assert [time["num_rows"] for time in found["forward_times"]] == [1, 2, 8, 16]


def invoked(verifier: FakeVerifier, *flags: str) -> Result:
    return runner.invoke(app, ["info", "--address", verifier.address, *flags])
