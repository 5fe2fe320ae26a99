"""`outrider generate`: continues one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from outrider_cli.chat import can_chat
from outrider_cli.console import is_toy, show, statistics, toy_note
from outrider_cli.failures import WRONG_USAGE, complain, flag_of, reported
from outrider_cli.json_lines import json_lines
from outrider_cli.options import DEFAULT_ADDRESS, NEED_JSON, Address, Plain, Stats, address_flag, generating, secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

FROM_STDIN = "-"


@secured
@generating()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")] = FROM_STDIN,
    *,
    address: Address = DEFAULT_ADDRESS,
    plain: Plain = False,
    stats: Stats = False,
    as_json: Annotated[bool, typer.Option("--json", help="Chunks and results as JSON, an object a line.")] = False,
    options: GenerateOptions,
    security: SecurityOptions,
) -> None:
    """Continues a prompt, coloured by where each token came from."""
    if stats and (plain or as_json):
        raise typer.BadParameter("must be unset with --plain, and with --json, which has it all", param_hint="--stats")
    if not as_json:
        for name in NEED_JSON:
            if options.get(name) is not None:
                raise typer.BadParameter("needs --json: a terminal has no place for it", param_hint=flag_of(name))
    with reported(), BlockingClient(address, **security) as client:
        text = _read_prompt(prompt)
        if as_json:
            with client.generate(text, **options) as generation:
                for line in json_lines(generation):
                    print(line, flush=True)
        elif (options.get("n") or 1) > 1:
            started = time.perf_counter()
            _show_all(client.complete(text, **options).choices, started, plain=plain, stats=stats)
        else:
            shown = show(client, text, options, plain=plain, stats=stats)
            if not plain and is_toy(shown.model_id):
                complain(toy_note(shown.model_id), kind="")
            elif not plain and sys.stderr.isatty():
                chat = f"outrider chat{address_flag(address)}, as this model was trained to chat"
                complain(f"next: {chat if can_chat(client) else '--stats shows what speculation did'}", kind="")


def _show_all(results: Sequence[Result], started: float, *, plain: bool, stats: bool) -> None:
    """Shows several texts, one after the other. Their headings go to stderr, as does the summary."""
    seconds = time.perf_counter() - started
    for number, result in enumerate(results, start=1):
        print(f"text {number} of {len(results)}, seed {result.seed}:", file=sys.stderr, flush=True)
        print(result.text, flush=True)
        if stats:
            complain(statistics(result, seconds).plain, kind="")
    num_tokens = sum(len(result.token_ids) for result in results)
    if not plain:
        complain(f"{len(results)} texts, {num_tokens} tokens, {num_tokens / seconds:.0f} a second", kind="")


def _read_prompt(prompt: str) -> str:
    if prompt != FROM_STDIN:
        return prompt
    # Reading a terminal would look like a command that hangs.
    if sys.stdin.isatty():
        complain("no prompt: give one, or pipe one to `outrider generate -`")
        raise typer.Exit(WRONG_USAGE)
    # Not the text layer: in a locale without UTF-8 it would let through what no server takes, and it changes line ends.
    given = sys.stdin.buffer.read()
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 (byte {error.start})") from None
