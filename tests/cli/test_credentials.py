"""Tokens for callers, as `outrider credentials new` makes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.security.credentials import credential_book
from outrider_cli.app import app

runner = CliRunner()


def new(*flags: str) -> tuple[str, dict[str, object]]:
    """The token and the entry."""
    result = runner.invoke(app, ["credentials", "new", "--role", "generate", *flags])
    assert result.exit_code == 0, result.output
    token, entry = result.stdout.splitlines()
    return token, json.loads(entry)


def test_an_entry_is_what_a_server_reads(tmp_path: Path) -> None:
    limits = ("--num-sessions", "3", "--requests-per-minute", "0.5", "--tokens-per-minute", "1e4")
    token, entry = new("--role", "retrieve", "--tenant", "acme", *limits)
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps([entry]), encoding="utf-8")
    book = credential_book(str(file), has_client_certificates=False)
    caller = book.current().with_token(token)
    assert caller is not None
    assert caller.tenant == "acme"
    assert (caller.limits.num_sessions, caller.limits.requests_per_minute) == (3, 0.5)
    assert caller.limits.tokens_per_minute == 1e4
    assert {role.value for role in caller.roles} == {"generate", "retrieve"}
    assert "limits" not in new()[1]


@pytest.mark.parametrize("flag", ["--requests-per-minute", "--tokens-per-minute"])
@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_that_a_server_would_refuse_is_refused(flag: str, rate: str) -> None:
    result = runner.invoke(app, ["credentials", "new", "--role", "generate", f"{flag}={rate}"])
    assert result.exit_code == 2
    assert f"error: {flag} must be a number > 0, got" in result.stderr


def test_the_name_of_those_without_a_tenant_is_no_tenants() -> None:
    result = runner.invoke(app, ["credentials", "new", "--role", "generate", "--tenant", "default"])
    assert result.exit_code == 2
    assert "--tenant must be another name: this one stands for those that have none, got 'default'" in result.stderr


def test_an_entry_is_added_to_a_file_that_a_server_reads(tmp_path: Path) -> None:
    file = tmp_path / "callers.json"
    tokens = [runner.invoke(app, ["credentials", "new", "--role", "generate", "--add", str(file)]).stdout.strip()]
    file.chmod(0o640)
    more = ["credentials", "new", "--role", "manage", "--tenant", "acme", "--add", str(file)]
    tokens.append(runner.invoke(app, more).stdout.strip())
    assert all(len(token.splitlines()) == 1 for token in tokens)
    book = credential_book(str(file), has_client_certificates=False).current()
    first, second = map(book.with_token, tokens)
    assert first is not None
    assert second is not None
    assert (first.tenant, second.tenant) == ("", "acme")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "rule"), [("{}", "--add must be a file with a JSON array of entries"), ("[", "must be JSON")]
)
def test_a_file_that_is_no_list_of_entries_stays_as_it_is(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "callers.json"
    file.write_text(text, encoding="utf-8")
    result = runner.invoke(app, ["credentials", "new", "--role", "generate", "--add", str(file)])
    assert result.exit_code == 2
    assert rule in result.stderr
    assert (result.stdout, file.read_text(encoding="utf-8")) == ("", text)


def test_json_has_the_token_and_its_entry() -> None:
    result = runner.invoke(app, ["credentials", "new", "--role", "generate", "--json"])
    found = json.loads(result.stdout)
    assert found["entry"]["token_sha256"] == hashlib.sha256(found["token"].encode()).hexdigest()
