"""`outrider chat`: a conversation, every answer streamed to the terminal."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.v1 import verifier_pb2
from outrider_cli.console import is_toy, legend, show
from outrider_cli.failures import FlagError, complain, reported
from outrider_cli.json_lines import refused_turn_line, turn_line
from outrider_cli.options import DEFAULT_ADDRESS, NEED_JSON, Address, Plain, generating, secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.chats import ChatMessage, ChatOptions
from outrider_client.errors import FailedPrecondition, InvalidArgument, OutOfRange
from outrider_client.generation import Transcript
from outrider_client.requests import GenerateOptions

MAX_TOKENS = 512
"""Longest answer if the model has no default: a small one that rambles may never emit its end-of-sequence token."""
NOT_IN_A_CHAT = ("n", *NEED_JSON)
"""Flags of `generate` that ask for more than one answer, or for more than a conversation shows."""
COMMANDS = {
    "/help": "lists the commands",
    "/reset": "forgets what was said",
    "/stats": "counts what was said",
    "/exit": "ends, as Ctrl-D does",
}
"""Lines that are not sent to the model, and their effects."""
LEAST_ROOM = 4
"""The oldest turns are forgotten before an answer gets less than 1/LEAST_ROOM of the context."""


@secured
@generating(without=NOT_IN_A_CHAT)
def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    plain: Plain = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, one for each turn.")] = False,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="More for the chat template: '{\"enable_thinking\": false}'.")
    ] = None,
    options: GenerateOptions,
    security: SecurityOptions,
) -> None:
    """Talks with the model. /help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    with reported():
        if chat_template_kwargs is not None:
            options["chat_template_kwargs"] = _json_object(chat_template_kwargs, "--chat-template-kwargs")
        with BlockingClient(address, **security) as client:
            # Asked first: it fails at once if there is no server, not after the first line was typed.
            info = client.info()
            options["max_tokens"] = options.get("max_tokens") or info.model.default_sampling.max_tokens or MAX_TOKENS
            _check_template(client, options)
            conversation = Conversation(client, info, options, system, plain=plain, as_json=as_json)
            if not (plain or as_json):
                _introduce(info.model.model_id)
            while (line := _read_line("" if as_json else "[bold]you>[/] ")) not in (None, "/exit"):
                conversation.take(line)


class Conversation:
    """Holds what was said. If the context is full, it forgets the oldest turns."""

    def __init__(
        self,
        client: BlockingClient,
        info: verifier_pb2.GetInfoResponse,
        options: GenerateOptions,
        system: str | None,
        *,
        plain: bool,
        as_json: bool = False,
    ) -> None:
        """
        Args:
            client: Generates the answers.
            info: The server's description of itself.
            options: Options of each answer.
            system: What the model is told first, and never forgets. None or an empty text: nothing.
            plain: Shows the answers alone.
            as_json: Prints each turn as a JSON object when it is over.
        """
        self._client, self._options, self._plain, self._as_json = client, options, plain, as_json
        context_len = info.model.max_context_len
        self._context_len = min(context_len, info.kv_pool.num_tokens or context_len)
        self._beginning = [ChatMessage(role="system", content=system)] if system else []
        self._messages = list(self._beginning)
        self._num_turns = self._num_answers = self._num_tokens = self._num_forgotten = 0
        self._seconds = 0.0

    def take(self, line: str) -> None:
        """Follows a command, or sends what the user has said and shows the answer."""
        match line:
            case "":
                return
            case "/help":
                complain("\n".join(f"{name:7} {effect}" for name, effect in COMMANDS.items()), kind="")
            case "/reset":
                self._messages = list(self._beginning)
                complain("what was said is forgotten", kind="")
            case "/stats":
                complain(self._stats(), kind="")
            # A path is no command: it has another slash.
            case _ if word := re.match(r"/\w+(?=\s|$)", line):
                near = get_close_matches(word[0], COMMANDS, n=1)
                advice = f"did you mean {near[0]}?" if near else "/help lists them"
                complain(f"there is no command {word[0]}: {advice}")
            case _:
                self._say(line)

    def _say(self, line: str) -> None:
        self._num_turns += 1
        self._messages.append(ChatMessage(role="user", content=line))
        try:
            answer = self._answer()
        except OutOfRange as error:
            complain(f"{error.message}; what you said is left out")
            if self._as_json:
                print(refused_turn_line(self._num_turns, line, error.message), flush=True)
            self._messages.pop()
            return
        if self._as_json:
            print(turn_line(self._num_turns, line, answer), flush=True)
        # Also an answer that Ctrl-C has cut short: the model should know what the user has seen of it.
        self._messages.append(ChatMessage(role="assistant", content=answer.text))

    def _answer(self) -> Transcript:
        """Shows the answer. Raises OutOfRange if the last message alone is too long."""
        options = self._options
        while True:
            started = time.perf_counter()
            try:
                answer = self._streamed(options)
            except OutOfRange as error:
                options = self._with_room(options, error)
                continue
            self._seconds += time.perf_counter() - started
            self._num_answers += 1
            self._num_tokens += len(answer.token_ids)
            return answer

    def _streamed(self, options: GenerateOptions) -> Transcript:
        if not self._as_json:
            return show(self._client, self._messages, options, plain=self._plain, in_chat=True)
        with self._client.generate(self._messages, **options) as generation, suppress(KeyboardInterrupt):
            for _ in generation:
                pass
        return generation

    def _with_room(self, options: GenerateOptions, error: OutOfRange) -> GenerateOptions:
        """Forgets turns or shortens the answer, and says so. Returns the options for another try. Raises the error if
        nothing is left to give up."""
        wanted = options.get("max_tokens") or MAX_TOKENS
        if self._room([*self._beginning, self._messages[-1]]) < 1:
            raise error  # forgetting would not help
        room = self._room(self._messages)
        # If there is room, the server refuses for a limit of its own, which it does not tell beforehand.
        is_prompt_too_long = room >= wanted
        num_forgotten = 0
        while (is_prompt_too_long or room < min(wanted, self._context_len // LEAST_ROOM)) and self._forget():
            num_forgotten += 1
            room, is_prompt_too_long = self._room(self._messages), False
        if num_forgotten:
            self._num_forgotten += num_forgotten
            turns = "turn is" if num_forgotten == 1 else f"{num_forgotten} turns are"
            complain(f"the context is full: the oldest {turns} forgotten", kind="")
        if is_prompt_too_long:
            raise error
        if room < wanted:
            complain(f"the context is full: the answer may have {room} tokens, not {wanted}", kind="")
            return GenerateOptions(**{**options, "max_tokens": room})
        return options

    def _room(self, messages: list[ChatMessage]) -> int:
        """Counts the tokens that the context has left for an answer; below 1 means none."""
        options = ChatOptions(chat_template_kwargs=self._options.get("chat_template_kwargs"))
        return self._context_len - len(self._client.tokenize(messages, **options))

    def _forget(self) -> bool:
        """Drops the oldest message of the user's and its answer. Returns False if only the last one is left."""
        start = len(self._beginning)
        if len(self._messages) - start < 2:
            return False
        del self._messages[start : start + 2]
        return True

    def _stats(self) -> str:
        speed = f" ({self._num_tokens / self._seconds:.0f} tokens/s)" if self._seconds else ""
        parts = [
            f"answers: {self._num_answers}",
            f"tokens: {self._num_tokens} in {self._seconds:.1f} s{speed}",
            f"messages remembered: {len(self._messages)}",
            f"turns forgotten: {self._num_forgotten}",
        ]
        if self._messages:
            parts.append(f"context: {self._context_len - self._room(self._messages)} of {self._context_len} tokens")
        return " · ".join(parts)


def can_chat(client: BlockingClient) -> bool:
    """Returns True if the model was trained to chat: it has a template for chats, and is not one of those included."""
    try:
        _check_template(client, GenerateOptions())
    except FailedPrecondition:
        return False
    return not is_toy(client.info().model.model_id)


def _check_template(client: BlockingClient, options: GenerateOptions) -> None:
    """Raises FailedPrecondition for a model that has no template for chats."""
    variables = ChatOptions(chat_template_kwargs=options.get("chat_template_kwargs"))
    try:
        client.tokenize([ChatMessage(role="user", content="hello")], **variables)
    except FailedPrecondition as error:
        raise FailedPrecondition(f"{error.message}; `outrider generate` goes on with a text") from error
    except InvalidArgument:
        pass  # this template wants another chat than this one, and will refuse wrong messages itself


def _introduce(model_id: str) -> None:
    err = Console(stderr=True, highlight=False)
    if Console().is_terminal:
        err.print(legend())
    if is_toy(model_id):
        complain(f"{model_id} was trained on Python's library, not to chat: it goes on with what it reads", kind="")


def _read_line(asking: str) -> str | None:
    """Returns a line that the user types; None at the end."""
    try:
        # Asked on stderr: stdout is for answers alone.
        line = Console(stderr=True).input(asking).strip()
        line.encode()  # a locale without UTF-8 lets through what no server takes
    except EOFError:
        return None
    except UnicodeError:
        complain("this line is not UTF-8, and left out")
        return ""
    return line


def _json_object(text: str, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise FlagError(flag, "a JSON object", text)
    return value
