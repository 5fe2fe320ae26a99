"""`outrider chat`: a conversation, every answer streamed to the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from outrider_cli.console import show
from outrider_cli.failures import reported
from outrider_cli.options import DEFAULT_ADDRESS, Address, Plain, generating, secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.chats import ChatMessage
from outrider_client.requests import GenerateOptions

MAX_TOKENS = 512
"""Bounds an answer: a small model that has lost the thread may never emit its end-of-sequence token."""
NOT_IN_A_CHAT = (
    "timeout_s",
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "num_speculative_tokens",
    "lookahead",
    "min_path_probability",
)
"""Flags of `generate` that tune one text, or measure: `outrider chat` leaves them out on purpose."""


@secured
@generating(without=NOT_IN_A_CHAT, max_tokens=MAX_TOKENS)
def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    plain: Plain = False,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    options: GenerateOptions,
    security: SecurityOptions,
) -> None:
    """Talks with the model. /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    beginning = [ChatMessage(role="system", content=system)] if system else []
    messages = list(beginning)
    with reported(address), BlockingClient(address, **security) as client:
        client.info()  # fails at once if there is no server, not after the first line was typed
        while (line := _read_line()) is not None:
            if line == "/reset":
                messages = list(beginning)
            elif line:
                messages.append(ChatMessage(role="user", content=line))
                answer = show(client, messages, options, plain=plain, stoppable=True)
                # Also an answer that Ctrl-C has cut short: the model should know what the user has seen of it.
                messages.append(ChatMessage(role="assistant", content=answer.text))


def _read_line() -> str | None:
    """Returns a line that the user types; None at the end."""
    try:
        # Asked on stderr: stdout is for answers alone.
        line = Console(stderr=True).input("[bold]you>[/] ").strip()
    except EOFError:
        return None
    return None if line == "/exit" else line
