"""A generation as JSON, an object a line: for programs, and for all that a terminal has no place for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from outrider.core.params import Source
from outrider.core.reports import TokenLogprobs
from outrider_client.blocking import BlockingGeneration
from outrider_client.generation import Chunk, Result, Transcript


def json_lines(generation: BlockingGeneration) -> Iterator[str]:
    """Yields each chunk as it comes, and at the end each text's result: `{"chunk": ...}` and `{"result": ...}`."""
    for chunk in generation:
        yield json.dumps({"chunk": _chunk(chunk)})
    for index, result in enumerate(generation.result.choices or (generation.result,)):
        yield json.dumps({"result": {"index": index, **_result(result)}})


def turn_line(number: int, message: str, answer: Transcript) -> str:
    """Returns a turn of a chat: its number, what the user has said, and the answer with all that is known of it. An
    answer that was cut short has its text and tokens alone."""
    try:
        told = _result(answer.result)
    except RuntimeError:
        told = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": None}
    return json.dumps({"turn": number, "message": message, **told})


def refused_turn_line(number: int, message: str, reason: str) -> str:
    """Returns a turn of a chat that has no answer, and why."""
    return json.dumps({"turn": number, "message": message, "error": reason})


def _chunk(chunk: Chunk) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": chunk.index,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "sources": [_source(source) for source in chunk.sources],
        "num_drafted": chunk.num_drafted,
    }
    if chunk.logprobs:
        found["logprobs"] = [_logprobs(each) for each in chunk.logprobs]
    if chunk.round is not None:
        found["round"] = fields_of(chunk.round)
    return found


def _result(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason.value,
        "stop_token_id": result.stop_token_id,
        "stop_string": result.stop_string,
        "seed": result.seed,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_prompt_tokens": result.num_cached_prompt_tokens,
        "num_output_tokens": result.num_output_tokens,
        "num_resumes": result.num_resumes,
        "missing_peers": result.missing_peers,
        "summary": fields_of(result.summary),
    }
    # Only what was asked for.
    if result.prompt_token_ids:
        found |= {"prompt_token_ids": result.prompt_token_ids, "prompt_text": result.prompt_text}
    if result.prompt_logprobs:
        found["prompt_logprobs"] = [_logprobs(each) for each in result.prompt_logprobs]
    return found


def _source(source: Source | None) -> str | None:
    return None if source is None else source.name.lower()


def _logprobs(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in logprobs.top]
    return {"logprob": logprobs.logprob, "rank": logprobs.rank, "top": top}


def fields_of(message: Message) -> dict[str, Any]:
    """Returns a message of the protocol with all its fields, by their names there."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
