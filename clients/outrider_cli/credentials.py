"""`outrider credentials`: makes tokens for callers, and their entries for a server's --credentials file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import typer

from outrider.security.callers import DEFAULT_TENANT, Role
from outrider_cli.failures import FlagError, reported
from outrider_cli.help import BriefCommand, CommandGroup

TOKEN_BYTES = 32
"""Random bytes of a token. They cannot be guessed, so the hash needs neither salt nor a slow function."""

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Makes tokens for callers of servers with --credentials."
)


@app.callback()
def credentials() -> None:
    """Makes tokens for callers of servers with --credentials."""


@app.command(cls=BriefCommand)
def new(
    *,
    role: Annotated[list[Role], typer.Option(help="What the caller may do. Can be repeated.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="Tenant of the caller. Default: none.", show_default=False)] = "",
    num_sessions: Annotated[int | None, typer.Option(help="Most sessions of the tenant at a time.", min=1)] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most requests of the tenant.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Most generated tokens of the tenant.")] = None,
    add: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Puts the entry into this file of a server.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Token and entry as a JSON object.")] = False,
) -> None:
    """Prints a new token, and below it the entry for a server's file, if it is not added there. The token is kept
    nowhere.
    """
    with reported():
        if tenant == DEFAULT_TENANT:
            raise FlagError("--tenant", "another name: this one stands for those that have none", tenant)
        _check_rate("--requests-per-minute", requests_per_minute)
        _check_rate("--tokens-per-minute", tokens_per_minute)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    entry: dict[str, Any] = {"token_sha256": hashlib.sha256(token.encode()).hexdigest()}
    if tenant:
        entry["tenant"] = tenant
    entry["roles"] = [each.value for each in dict.fromkeys(role)]
    limits = {
        "num_sessions": num_sessions,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    if limits:
        entry["limits"] = limits
    if add is not None:
        with reported():
            _add(entry, add)
    if as_json:
        typer.echo(json.dumps({"token": token, "entry": entry}))
        return
    typer.echo(token)
    if add is None:
        typer.echo(json.dumps(entry))


def _add(entry: dict[str, Any], path: Path) -> None:
    """Adds an entry to a file, which is made if there is none. A server never reads half a file."""
    entries = []
    if path.exists():
        try:
            entries = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"--add: {path} must be JSON: {error}") from None
        if not isinstance(entries, list):
            raise FlagError("--add", "a file with a JSON array of entries", path)
    # In the same folder: only within one file system a rename replaces the file at once.
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as written:
        try:
            written.write("[\n" + ",\n".join(f"  {json.dumps(each)}" for each in [*entries, entry]) + "\n]\n")
            written.flush()
            if path.exists():
                os.chmod(written.name, path.stat().st_mode & 0o777)
            os.replace(written.name, path)
        except BaseException:
            os.unlink(written.name)
            raise


def _check_rate(flag: str, per_minute: float | None) -> None:
    """Raises FlagError for a rate that a server would refuse in its file."""
    # Not `min` of the option, which lets the bound itself through.
    if per_minute is not None and not 0 < per_minute < math.inf:
        raise FlagError(flag, "a number > 0", per_minute)
