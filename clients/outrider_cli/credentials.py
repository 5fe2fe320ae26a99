"""`outrider credentials`: tokens for callers, and what a server's --credentials file says of them."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Any

import typer

from outrider.security.callers import Role

TOKEN_BYTES = 32
"""Of chance. Nobody guesses it, so its hash needs neither salt nor time."""

app = typer.Typer(no_args_is_help=True, help="Makes tokens for callers of servers with --credentials.")


@app.callback()
def credentials() -> None:
    """Makes tokens for callers of servers with --credentials."""


@app.command()
def new(
    *,
    role: Annotated[list[Role], typer.Option(help="What the caller may do. Can be repeated.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="Whom it belongs to. Default: nobody.", show_default=False)] = "",
    num_sessions: Annotated[int | None, typer.Option(help="Most sessions of the tenant at a time.", min=1)] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most requests of the tenant.", min=0)] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Most generated tokens of the tenant.", min=0)] = None,
) -> None:
    """Prints a new token, and below it the entry for the file. The token is kept nowhere."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    entry: dict[str, Any] = {"token_sha256": hashlib.sha256(token.encode()).hexdigest()}
    if tenant:
        entry["tenant"] = tenant
    entry["roles"] = [each.value for each in dict.fromkeys(role)]
    asked = {
        "num_sessions": num_sessions,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    limits = {name: value for name, value in asked.items() if value}
    if limits:
        entry["limits"] = limits
    typer.echo(token)
    typer.echo(json.dumps(entry))
