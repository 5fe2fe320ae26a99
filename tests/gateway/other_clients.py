"""Common calls of LangChain and litellm. Prints one JSON object with the results of each.

Runs in a separate environment, without our packages: python other_clients.py URL MODEL PROMPT.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import litellm
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL, PROMPT = sys.argv[1:]


class Answer(BaseModel):
    """Says yes or no."""

    verdict: Literal["yes", "no"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather of a city."""
    return f"fair in {city}"


async def langchain() -> dict[str, Any]:
    """Returns the results of LangChain's models."""
    given = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "seed": 7, "max_tokens": 20}
    chat = ChatOpenAI(**given)
    single = ChatOpenAI(**{**given, "max_tokens": 200}).bind_tools(
        [weather], tool_choice="weather", strict=True, parallel_tool_calls=False
    )
    structured = ChatOpenAI(**{**given, "max_tokens": 100}).with_structured_output(Answer, method="json_schema")
    pieces = [piece async for piece in chat.astream("hello", stream_usage=True)]
    asked = await single.ainvoke("hello")
    streamed = None
    async for piece in single.astream("hello"):
        streamed = piece if streamed is None else streamed + piece
    return {
        "invoke": chat.invoke("hello").content,
        "stream": "".join(str(piece.content) for piece in pieces),
        "usage": next(piece.usage_metadata for piece in reversed(pieces) if piece.usage_metadata),
        "batch": [message.content for message in await chat.abatch(["hello", "a list is"])],
        "completion": OpenAI(**given).invoke(PROMPT),
        "structured": structured.invoke("hello").model_dump(),
        "calls": [[call["name"], call["args"]] for call in asked.tool_calls],
        "streamed_calls": [[call["name"], call["args"]] for call in streamed.tool_calls],
        "tool": weather.invoke(asked.tool_calls[0]).content,
        "logprobs": len(chat.bind(logprobs=True).invoke("hello").response_metadata["logprobs"]["content"]),
    }


async def through_litellm() -> dict[str, Any]:
    """Returns the results of litellm, which aider and many others use."""
    given: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "seed": 7, "max_tokens": 20,
        "messages": [{"role": "user", "content": "hello"}], "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**given)
    stream = await litellm.acompletion(stream=True, stream_options={"include_usage": True}, **given)
    pieces = [piece async for piece in stream]
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=URL, api_key="none", prompt=PROMPT, seed=7, max_tokens=20
    )
    errors = []
    for wrong in ({"temperature": -1}, {"model": "openai/gpt-5"}):
        try:
            litellm.completion(**{**given, **wrong})
        except litellm.exceptions.APIError as error:
            errors.append([type(error).__name__, error.status_code])
        except Exception as error:
            errors.append([type(error).__name__, getattr(error, "status_code", None)])
    return {
        "completion": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "stream": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        "text": text.choices[0].text,
        "errors": errors,
    }


async def main() -> None:
    """Prints all results."""
    print(json.dumps({"langchain": await langchain(), "litellm": await through_litellm()}))


if __name__ == "__main__":
    asyncio.run(main())
