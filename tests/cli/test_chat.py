"""`outrider chat`: a conversation."""

from __future__ import annotations

from typer.testing import CliRunner

from outrider_cli.app import app
from tests.support.fake_verifier import FakeVerifier

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def test_a_chat_remembers_until_it_is_reset(verifier: FakeVerifier) -> None:
    typed = "hi\nagain\n/reset\nnew\n/exit\n"
    result = runner.invoke(app, ["chat", "--system", "Be brief.", "--address", verifier.address], input=typed)
    assert result.exit_code == 0
    spoken = [[message.content for message in request.prompt.chat.messages] for request in verifier.requests]
    assert spoken == [["Be brief.", "hi"], ["Be brief.", "hi", "a b c d", "again"], ["Be brief.", "new"]]
