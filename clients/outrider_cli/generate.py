"""`outrider generate`: continues one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outrider_cli.console import show
from outrider_cli.failures import WRONG_USAGE, complain, reported
from outrider_cli.options import DEFAULT_ADDRESS, Address, Plain, generating, secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.requests import GenerateOptions

FROM_STDIN = "-"


@secured
@generating()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")] = FROM_STDIN,
    *,
    address: Address = DEFAULT_ADDRESS,
    plain: Plain = False,
    options: GenerateOptions,
    security: SecurityOptions,
) -> None:
    """Continues a prompt, coloured by where each token came from."""
    with reported(address), BlockingClient(address, **security) as client:
        show(client, _read_prompt(prompt), options, plain=plain)


def _read_prompt(prompt: str) -> str:
    if prompt != FROM_STDIN:
        return prompt
    # Reading a terminal would look like a command that hangs.
    if sys.stdin.isatty():
        complain("no prompt: give one, or pipe one to `outrider generate -`")
        raise typer.Exit(WRONG_USAGE)
    return sys.stdin.read()
