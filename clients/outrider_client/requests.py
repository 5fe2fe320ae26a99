"""From Python values to requests. What the caller leaves unset stays unset on the wire: defaults are the server's."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypedDict, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.core.params import AcceptanceRule, Method, RetrievalScope, Rows
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
    """How drafts are made: "off", "speculative", "pearl", "retrieval", "card", "saguaro", "double", "spacelike",
    "best-first", "auto". Changes the speed, never the text."""
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
    rows: Rows | str | None
    """What the rows of a target forward are spent on: one path ("chain") or the best sub-tree ("tree")."""
    max_rows: int | None
    """Drafted rows of one target forward, for "tree". Unset = as many as pay."""
    acceptance_rule: AcceptanceRule | str | None
    """Which drafted tokens are kept: "match" or "ratio". Under "ratio" the text depends on the drafts, its distribution
    does not."""
    shared_noise: bool | None
    """Whether the speculator ranks its guesses with the target's own noise."""
    allow_fallback: bool | None
    """Whether a method whose peer the server does not have may be replaced. The summary says by what."""
    card: Mapping[str, Any] | None
    """Parameters of "card", by the names that `CardParams` has in the protocol: `card={"beam_width": 50}`."""
    saguaro: Mapping[str, Any] | None
    """Parameters of "saguaro"; enums by name: `saguaro={"fan_out": "uniform"}`."""
    double: Mapping[str, Any] | None
    """Parameters of "double": `double={"tiers": ["prior", "dynamic"]}`."""
    spacelike: Mapping[str, Any] | None
    """Parameters of "spacelike"."""
    best_first: Mapping[str, Any] | None
    """Parameters of "best-first"."""
    resume_token_ids: Sequence[int] | None
    """What an interrupted generation of this very request has emitted: the output goes on after it (with its seed)."""
    timeout_s: float | None
    """Deadline of the whole generation, in seconds. Unset = none."""
    resume: bool | None
    """Whether a generation whose call breaks goes on in another call, on another replica if there is one. Unset = yes.
    Under "ratio" what is resumed has the right distribution, but is another text."""
    resume_timeout_s: float | None
    """How long that is tried, from the break to the next token, and how long for the first while servers restart. Unset
    = 30 s."""
    stall_timeout_s: float | None
    """How long a server may say nothing, the time to the first token included, before its call counts as broken. Unset
    = 30 s; infinite = for ever."""


_SAMPLING_FIELDS = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_SPECULATION_FIELDS = frozenset(types_pb2.SpeculationParams.DESCRIPTOR.fields_by_name)
_ENUMS = {
    "method": types_pb2.Method.DESCRIPTOR,
    "rows": types_pb2.Rows.DESCRIPTOR,
    "acceptance_rule": types_pb2.AcceptanceRule.DESCRIPTOR,
    "retrieval_scope": types_pb2.RetrievalScope.DESCRIPTOR,
}
"""Options that may be given by name."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> verifier_pb2.GenerateRequest:
    """The request for a prompt and options.

    Raises TypeError for an option that does not exist or has the wrong type, and ValueError for one that the wire
    cannot hold. Ranges are the server's business.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    for name in given.keys() & _ENUMS.keys():
        given[name] = enum_number(_ENUMS[name], given[name], name)
    own = [name for name in METHOD_MESSAGES if name in given]
    if len(own) > 1:
        raise TypeError(f"generate() got parameters of more than one method: {', '.join(own)}")
    for name in own:
        given[name] = method_message(name, given[name])
    retrieval: dict[str, Any] = {name: given[name] for name in given.keys() & {"contribute"}}
    if "retrieval_scope" in given:
        retrieval["scope"] = given["retrieval_scope"]
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


def method_name(number: int) -> str:
    """The name of a method: "best-first" for METHOD_BEST_FIRST, the number for one that this version does not know."""
    return enum_name(types_pb2.Method.DESCRIPTOR, number)


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


METHOD_MESSAGES: dict[str, type[Message]] = {
    "card": types_pb2.CardParams,
    "saguaro": types_pb2.SaguaroParams,
    "double": types_pb2.DoubleParams,
    "spacelike": types_pb2.SpacelikeParams,
    "best_first": types_pb2.BestFirstParams,
}
"""Messages of `SpeculationParams.method_params` by field."""


def enum_number(enum: EnumDescriptor, value: object, what: str) -> int:
    """The number of an enum's value on the wire: of a name like "best-first" or "TENANT", of a member of the enum in
    `outrider.core`, or the number itself. Raises ValueError for a name that does not exist."""
    if isinstance(value, int):
        return value
    said = value.name if isinstance(value, Enum) else value
    name = said.upper().replace("-", "_") if isinstance(said, str) else ""
    known = enum.values_by_name.get(_prefix(enum) + name)
    if known is None or known.number == 0:
        names = ", ".join(enum_name(enum, number) for number in enum.values_by_number if number)
        raise ValueError(f"{what} must be one of {names}, got {value!r}")
    return known.number


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """The name of an enum's value: "best-first" for METHOD_BEST_FIRST, the number for one that is not known here."""
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(_prefix(enum)).lower().replace("_", "-") if known is not None else str(number)


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


def method_message(field: str, params: Mapping[str, Any]) -> Message:
    """A method's parameters as their message. Enums may be given by name.

    Raises TypeError for a parameter that does not exist or has the wrong type, and ValueError for one that the wire
    cannot hold.
    """
    kind, fields = METHOD_MESSAGES[field], _fields(field)
    if unknown := params.keys() - fields.keys():
        raise TypeError(f"{field} must have parameters of {', '.join(fields)} only, got {min(unknown)!r}")
    message = kind()
    for name, value in params.items():
        sent = _wire_value(fields[name], value, f"{field}.{name}")
        try:
            message.MergeFrom(kind(**{name: sent}))
        except (TypeError, ValueError) as error:  # it says what is wrong, but not always with what
            raise type(error)(f"{field}.{name}: {error}") from None
    return message


def _wire_value(field: FieldDescriptor, value: Any, what: str) -> Any:
    if field.is_repeated and isinstance(value, str):
        raise TypeError(f"{what} must be a list, got {value!r}")
    if field.enum_type is None:
        return value
    if field.is_repeated:
        return [enum_number(field.enum_type, item, what) for item in value]
    return enum_number(field.enum_type, value, what)


def _fields(field: str) -> Mapping[str, FieldDescriptor]:
    """A method's parameters by name."""
    return cast(Mapping[str, FieldDescriptor], METHOD_MESSAGES[field].DESCRIPTOR.fields_by_name)


def parse_method_params(method: Method | None, pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The flags NAME=VALUE of a method, as keyword arguments of `generate`: {"card": {"beam_width": 50}}.

    Raises ValueError, naming the parameter, the rule and the value.
    """
    if not pairs:
        return {}
    field = "" if method is None else method.value.replace("-", "_")
    if field not in METHOD_MESSAGES:
        names = ", ".join(name.replace("_", "-") for name in METHOD_MESSAGES)
        raise ValueError(f"needs a --method with parameters of its own ({names}), got {pairs[0]!r}")
    fields = _fields(field)
    params: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not separator:
            raise ValueError(f"must be NAME=VALUE, got {pair!r}")
        if name not in fields:
            raise ValueError(f"must name one of {', '.join(fields)} with this method, got {name!r}")
        if name in params:
            raise ValueError(f"must name {name} once, got {pair!r}")
        params[name] = _parsed(fields[name], text.strip())
    return {field: params}


def _parsed(field: FieldDescriptor, text: str) -> Any:
    if field.is_repeated:
        return [_parsed_item(field, item.strip()) for item in text.split(",")]
    return _parsed_item(field, text)


def _parsed_item(field: FieldDescriptor, text: str) -> Any:
    if field.enum_type is not None:
        return enum_number(field.enum_type, text, field.name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text not in ("true", "false"):
            raise ValueError(f"{field.name} must be true or false, got {text!r}")
        return text == "true"
    kind, rule = (float, "a number") if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else (int, "a whole number")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{field.name} must be {rule}, got {text!r}") from None


def method_params_help() -> Iterable[str]:
    """A line for each method with parameters of its own."""
    for field in METHOD_MESSAGES:
        yield f"{field.replace('_', '-')}: {', '.join(_fields(field))}"
