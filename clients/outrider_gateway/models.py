"""GET /v1/models, and POST /tokenize and /detokenize: the model, and its tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from outrider_client.chats import ChatOptions
from outrider_client.errors import OutriderError
from outrider_client.requests import Prompt, prompt_message
from outrider_gateway.asks import CHAT_NAMES
from outrider_gateway.dialects.completions import completion_prompts
from outrider_gateway.errors import FieldNames, from_option, from_upstream, invalid
from outrider_gateway.exchange import Exchange
from outrider_gateway.outputs import unless_gone
from outrider_gateway.parameters import (
    Int32,
    Parameters,
    Text,
)
from outrider_gateway.tools.grammar import shown_tools


class TokenizeParameters(Parameters):
    """Holds a request to /tokenize."""

    model: str | None = None
    prompt: Text = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeParameters(Parameters):
    """Holds a request to /detokenize."""

    model: str | None = None
    tokens: list[Int32]


async def models(exchange: Exchange) -> None:
    """Lists the names of the model."""
    await exchange.answer({"object": "list", "data": await _listed(exchange)})


async def model(exchange: Exchange) -> None:
    """Describes the model by one of its names. Raises ApiError."""
    name = await exchange.upstream.served_model(exchange.scope["path_params"]["name"], exchange.token)
    await exchange.answer((await _listed(exchange))[0] | {"id": name})


async def _listed(exchange: Exchange) -> list[dict[str, Any]]:
    upstream = exchange.upstream
    info = await upstream.info(exchange.token)
    return [
        {
            "id": name,
            "object": "model",
            "created": upstream.started_at,
            "owned_by": "outrider",
            "root": info.model.model_id,
            "parent": None,
            "max_model_len": info.model.max_context_len,
        }
        for name in await upstream.model_names(exchange.token)
    ]


async def tokenize(exchange: Exchange) -> None:
    """Returns the tokens of a text or a chat, in vLLM's shape. Raises ApiError."""
    given = await exchange.parameters(TokenizeParameters)
    prompt, options = await exchange.heavy(partial(_prompt, given))
    names = FieldNames() if given.messages is None else FieldNames(CHAT_NAMES)
    token_ids = await token_ids_of(exchange, prompt, options, names)
    told: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": (await exchange.upstream.model(exchange.token)).model.max_context_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if given.return_token_strs:
        known = await exchange.upstream.token_bytes(token_ids)
        told["token_strs"] = [known[token_id].decode(errors="replace") for token_id in token_ids]
    await exchange.answer(told)


def _prompt(given: TokenizeParameters) -> tuple[Prompt, ChatOptions]:
    """Returns the prompt of a request, and the options of a chat. Raises ApiError."""
    if (given.prompt is None) == (given.messages is None):
        raise invalid("prompt", "must be set, or messages in its place", code="missing_required_parameter")
    options = ChatOptions()
    if given.messages is None:
        (prompt, *more) = completion_prompts(given.prompt)
        if more:
            raise invalid("prompt", "must be one text here")
        return prompt, options
    for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if (value := getattr(given, name)) is not None:
            options[name] = value
    return given.messages, options


async def token_ids_of(
    exchange: Exchange, prompt: Prompt, options: ChatOptions, names: FieldNames, choice: Any = None
) -> list[int]:
    """Returns the tokens of a prompt. Raises ApiError, ClientGone.

    Args:
        exchange: The request.
        prompt: The prompt.
        options: The options of a chat.
        names: The names of its fields in the request.
        choice: The choice of tools, as in `hold_calls`.
    """
    try:
        message = await exchange.heavy(lambda: prompt_message(prompt, shown_tools(options, choice)))
        return await unless_gone(exchange.receive, exchange.client().tokenize(message))
    except (TypeError, ValueError) as error:
        raise from_option(error, names) from None
    except OutriderError as error:
        raise from_upstream(error, names) from error


async def detokenize(exchange: Exchange) -> None:
    """Returns the text of tokens, in vLLM's shape. Raises ApiError."""
    given = await exchange.parameters(DetokenizeParameters)
    model = (await exchange.upstream.model(exchange.token)).model
    # The verifier's rule, checked before a message with millions of tokens is made.
    if len(given.tokens) > (most := max(model.max_context_len, model.vocab_size)):
        raise invalid("tokens", f"must have at most {most} tokens, got {len(given.tokens)}")
    try:
        text = await exchange.client().detokenize(given.tokens)
    except OutriderError as error:
        raise from_upstream(error, FieldNames([("token_ids", "tokens")])) from error
    await exchange.answer({"prompt": text})
