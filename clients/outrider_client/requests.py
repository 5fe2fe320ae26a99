"""From Python values to requests. What the caller leaves unset stays unset on the wire: defaults are the server's."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from outrider.core.params import Method, RetrievalScope
from outrider.v1 import types_pb2, verifier_pb2

ChatMessage = verifier_pb2.ChatMessage
"""One message of a chat: `role` ("system", "user", "assistant") and `content`."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text, token ids, or a chat: messages, or dicts with `role` and `content`."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`. Absent or None = unset: the server's default."""

    temperature: float | None
    """Divides the logits; 0 = greedy."""
    top_k: int | None
    """Keeps only the k most probable tokens; 0 = all."""
    top_p: float | None
    """Keeps the smallest set of most probable tokens whose probability reaches top_p."""
    min_p: float | None
    """Keeps tokens at least min_p times as probable as the most probable one."""
    seed: int | None
    """Keys the noise: the same request with the same seed gives the same text. Unset = drawn by the server."""
    max_tokens: int | None
    """Most tokens to generate. Unset = as many as the context has room for."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the generation; they are not part of the output."""
    ignore_eos: bool | None
    """Goes on after the model's end-of-sequence tokens."""
    method: Method | str | None
    """How drafts are made: "off", "speculative", "pearl", "retrieval". Changes the speed, never the text."""
    num_speculative_tokens: int | None
    """Most chain tokens verified in one round."""
    lookahead: int | None
    """How many tokens beyond the committed ones the speculator may draft."""
    min_path_probability: float | None
    """A chain ends where the draft model's probability of the whole path falls below this."""
    retrieval: bool | None
    """Adds retrieved continuations behind the chain, and lets the draft model verify them in phrases."""
    retrieval_scope: RetrievalScope | str | None
    """With whom retrieval shares: "session", "tenant", "global"."""
    contribute: bool | None
    """Whether the others of the scope may retrieve this session's tokens."""
    resume_token_ids: Sequence[int] | None
    """What an interrupted generation of this very request has emitted: the output goes on after it (with its seed)."""
    timeout_s: float | None
    """Deadline of the whole call, in seconds. Unset = none."""


_SAMPLING_FIELDS = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_SPECULATION_FIELDS = frozenset(types_pb2.SpeculationParams.DESCRIPTOR.fields_by_name)


def generate_request(prompt: Prompt, options: GenerateOptions) -> verifier_pb2.GenerateRequest:
    """The request for a prompt and options.

    Raises TypeError for an option that does not exist or has the wrong type, and ValueError for one that the wire
    cannot hold. Ranges are the server's business.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    if "method" in given:
        given["method"] = method_number(given["method"])
    retrieval: dict[str, Any] = {name: given[name] for name in given.keys() & {"contribute"}}
    if "retrieval_scope" in given:
        retrieval["scope"] = _scope_number(given["retrieval_scope"])
    if retrieval:
        given["retrieval_params"] = types_pb2.RetrievalParams(**retrieval)
    sampling = {name: given[name] for name in given.keys() & _SAMPLING_FIELDS}
    speculation = {name: given[name] for name in given.keys() & _SPECULATION_FIELDS}
    return verifier_pb2.GenerateRequest(
        prompt=prompt_message(prompt),
        sampling=types_pb2.SamplingParams(**sampling) if sampling else None,
        speculation=types_pb2.SpeculationParams(**speculation) if speculation else None,
        resume_token_ids=given.get("resume_token_ids", ()),
    )


def prompt_message(prompt: Prompt) -> verifier_pb2.Prompt:
    """The prompt in the form that its type says. Raises TypeError for anything else."""
    if isinstance(prompt, str):
        return verifier_pb2.Prompt(text=prompt)
    items = list(prompt)
    if items and isinstance(items[0], (ChatMessage, Mapping)):
        return verifier_pb2.Prompt(chat=verifier_pb2.ChatMessages(messages=[_chat_message(item) for item in items]))
    return verifier_pb2.Prompt(token_ids=verifier_pb2.TokenIds(token_ids=_token_ids(items)))


def method_number(method: Method | str) -> int:
    """The number of a method on the wire. Raises ValueError for a name that does not exist."""
    name = method.value if isinstance(method, Method) else method
    try:
        return types_pb2.Method.Value(f"METHOD_{name.upper()}")
    except ValueError:
        names = ", ".join(known.value for known in Method)
        raise ValueError(f"method must be one of {names}, got {name!r}") from None


def _scope_number(scope: RetrievalScope | str) -> int:
    name = scope.name if isinstance(scope, RetrievalScope) else scope.upper()
    if name not in RetrievalScope.__members__:
        names = ", ".join(known.name.lower() for known in RetrievalScope)
        raise ValueError(f"retrieval_scope must be one of {names}, got {scope!r}")
    return RetrievalScope[name].value


def method_name(number: int) -> str:
    """The name of a method: "pearl" for METHOD_PEARL, the number for one that this version does not know."""
    known = types_pb2.Method.DESCRIPTOR.values_by_number.get(number)
    return known.name.removeprefix("METHOD_").lower() if known is not None else str(number)


def _chat_message(item: object) -> ChatMessage:
    if isinstance(item, ChatMessage):
        return item
    if isinstance(item, Mapping):
        return ChatMessage(**item)
    raise TypeError(f"a chat must hold messages only, got {type(item).__name__}")


def _token_ids(items: Iterable[object]) -> list[int]:
    try:
        return [operator.index(item) for item in items]  # type: ignore[arg-type]
    except TypeError:
        raise TypeError("prompt must be text, token ids, or messages with role and content") from None
