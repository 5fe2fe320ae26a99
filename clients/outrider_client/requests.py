"""Makes requests from Python values. Unset options stay unset on the wire: defaults are the server's.

A parameter of the protocol is named once here, in `GenerateOptions`; its place on the wire is found by its name.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from outrider.core.params import AcceptanceRule, RetrievalScope, Rows, Source
from outrider.v1 import types_pb2, verifier_pb2
from outrider_client.chats import CHAT_OPTIONS, ChatMessage, ChatOptions, chat_messages, sendable
from outrider_client.enums import enum_number
from outrider_client.presets import published

_M = TypeVar("_M", bound=Message)

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, Any]] | verifier_pb2.Prompt
"""Text, token ids, or a chat: messages, or dicts in OpenAI's shape, with `role` and `content`. Or one of these as
`prompt_message` has made it."""


class GenerateOptions(ChatOptions, total=False):
    """Holds the keyword arguments of `generate` and `complete`. An absent one, or None, means the server's default."""

    temperature: float | None
    """Divides the logits; 0 means greedy."""
    top_k: int | None
    """Keeps only the k most probable tokens; 0 means all."""
    top_p: float | None
    """Keeps the smallest set of most probable tokens whose probability reaches top_p."""
    min_p: float | None
    """Keeps tokens at least min_p times as probable as the most probable one."""
    seed: int | None
    """Keys the noise: the same request with the same seed gives the same text. Unset: the server draws one."""
    max_tokens: int | None
    """Most tokens to generate. Unset: as many as the context has room for."""
    clamp_max_tokens: bool | None
    """Takes `max_tokens` as a wish: where there is room for less, as much is generated as there is room for."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the generation; they are not part of the output."""
    ignore_eos: bool | None
    """Goes on after the model's end-of-sequence tokens."""
    stop: str | Sequence[str] | None
    """A string that ends the generation, or several; nothing after it is sent. The text ends before it."""
    include_stop_str_in_output: bool | None
    """Has the text end with the stop string."""
    min_tokens: int | None
    """Least number of tokens to generate before anything stops it."""
    repetition_penalty: float | None
    """Makes tokens of prompt and output rarer (above 1) or more frequent (below 1)."""
    presence_penalty: float | None
    """Taken off the logits of tokens that the output has: -2 to 2."""
    frequency_penalty: float | None
    """Taken off a token's logit once for each time that the output has it: -2 to 2."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these tokens: -100 to 100."""
    bad_words: Sequence[str] | None
    """Words that the output must not have."""
    bad_words_token_ids: Sequence[Sequence[int]] | None
    """The same by token ids."""
    structured_outputs: Mapping[str, Any] | None
    """Has the output obey a description: `{"json": schema}`, `{"json_object": True}`, `{"regex": "[a-z]+"}`,
    `{"grammar": text}` in Lark's notation or in GBNF, or `{"choice": ["yes", "no"]}`. A schema is a dict or JSON. With
    `"begins_after": "</think>"` beside it, it holds behind this text; with `"special_tokens_as_text": True`, special
    tokens count as the text that they are written as."""
    n: int | None
    """Generates so many texts; the prompt is read once. `Result.choices` has all of them, `Chunk.index` says of which
    one a chunk is. The first one is the text of a request without `n`."""
    truncate_prompt_tokens: int | None
    """Keeps only so many tokens of the prompt, the last ones."""
    logprobs: int | None
    """Reports the log-probability of each output token, and those of so many most probable ones at its place: 0 to
    20."""
    prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    logprobs_mode: str | None
    """Log-probabilities ("raw-logprobs") or logits ("raw-logits") of the model, or those that tokens are drawn by,
    after temperature, penalties and filters ("processed-logprobs", "processed-logits")."""
    echo: bool | None
    """Reports the prompt as the target reads it: `Result.prompt_token_ids` and `Result.prompt_text`."""
    rounds: bool | None
    """Reports what each round did: `Chunk.round`."""
    trees: bool | None
    """Reports with that the drafted tokens that each round verified: `Chunk.round.tree`."""
    text_ends: bool | None
    """Reports where the text of each token ends: `Chunk.text_ends`."""
    skip_special_tokens: bool | None
    """Leaves special tokens out of the text. Unset: yes. False for models whose tool calls begin with one, like
    Mistral's; the tokens are the same."""
    method: str | None
    """Makes drafts by this method: "off", "auto", or any other name of `outrider.core.methods.METHODS`. Changes the
    speed, never the text."""
    num_speculative_tokens: int | None
    """Most chain tokens verified in one round."""
    lookahead: int | None
    """Most tokens beyond the committed ones that the speculator may draft."""
    min_path_probability: float | None
    """A chain ends where the draft model's probability of the whole path falls below this."""
    retrieval: bool | None
    """Adds retrieved continuations after the chain, and lets the draft model verify them in phrases."""
    retrieval_scope: RetrievalScope | str | None
    """Shares retrieved tokens within this scope: "session", "tenant", "global"."""
    prediction: str | None
    """A text that the output will probably repeat parts of, like the file that is to be edited: continuations are
    looked up in it. Only with a method that retrieves in the verifier."""
    contribute: bool | None
    """Lets the others of the scope retrieve this session's tokens."""
    sources: Sequence[Source | str] | None
    """Looks continuations up in these, the preferred first: "recycled", "pool", "prior", "dynamic", "shared",
    "rejected", "ring". Unset: the last five, which are the datastore's tiers."""
    retrieval_remote: bool | None
    """Asks the datastore for all of its tiers, in place of the copies that verifier and speculator hold."""
    rows: Rows | str | None
    """Spends the rows of a target forward on one path ("chain") or on the best sub-tree ("tree")."""
    max_rows: int | None
    """Most drafted rows of one target forward, for "tree". Unset: as many as pay."""
    acceptance_rule: AcceptanceRule | str | None
    """Decides which drafted tokens are kept: "match" or "ratio". Under "ratio" the text depends on the drafts, its
    distribution does not."""
    shared_noise: bool | None
    """Has the speculator rank its guesses with the target's own noise."""
    calibration: bool | None
    """Scores drafts by how often the target has agreed with such drafts. False: by the draft model's own probabilities,
    as the papers have it."""
    as_published: bool | None
    """Takes the method as its paper has it, to compare: with the paper's rule and parameters, without the target's
    noise, calibration and refill. What contradicts that is an error; see
    `Method.published`."""
    allow_fallback: bool | None
    """Lets the server replace a method whose peer it does not have. The summary names the method that ran."""
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
    opt_tree: Mapping[str, Any] | None
    """Parameters of "opt-tree": `opt_tree={"num_nodes": 50}`."""
    sequoia: Mapping[str, Any] | None
    """Parameters of "sequoia": `sequoia={"num_nodes": 64}`."""
    resume_token_ids: Sequence[int] | None
    """Tokens that an interrupted generation of this very request has emitted: the output goes on after them. Needs its
    seed."""
    timeout_s: float | None
    """Deadline of the whole generation, in seconds. Unset: none."""
    resume: bool | None
    """Resumes a generation whose call breaks in another call, on another replica if there is one. Unset: yes. Under
    "ratio" a resumed text has the right distribution, but is another text."""
    resume_timeout_s: float | None
    """Longest time from the break until a server reads the text or goes on with it, in seconds, and to the first token
    while servers restart. Unset: 30."""
    stall_timeout_s: float | None
    """Longest silence of a server, in seconds, before its call counts as broken. One that reads a long prompt, or has
    no room for it yet, says so once a second. Unset: 30; infinite: no limit."""


_SPECULATION = types_pb2.SpeculationParams.DESCRIPTOR
RETRIEVAL_FIELDS = {
    "retrieval_scope": "scope",
    "contribute": "contribute",
    "sources": "sources",
    "retrieval_remote": "remote",
}
"""Options that are fields of `RetrievalParams`, by their names there."""

METHOD_MESSAGES: dict[str, type[Message]] = {
    field.name: GetMessageClass(cast(Descriptor, field.message_type))
    for field in _SPECULATION.oneofs_by_name["method_params"].fields
}
"""Messages of a method's own parameters, by their field in `SpeculationParams`."""

ENUMS: dict[str, EnumDescriptor] = {
    **{
        field.name: cast(EnumDescriptor, field.enum_type)
        for field in _SPECULATION.fields
        if field.enum_type is not None
    },
    "retrieval_scope": types_pb2.RetrievalScope.DESCRIPTOR,
    "logprobs_mode": verifier_pb2.LogprobsMode.DESCRIPTOR,
}
"""Options that may be given by the name of their value."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> verifier_pb2.GenerateRequest:
    """Returns the request for a prompt and options. The server checks ranges.

    Raises:
        TypeError: An option does not exist, or has the wrong type.
        ValueError: The wire cannot hold a value, or it contradicts `as_published`.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    # Python does not check a TypedDict when it runs. `min`: of several, always the same one is named.
    known = GenerateOptions.__annotations__.keys() | METHOD_MESSAGES.keys()
    if unknown := given.keys() - known:
        raise _unexpected("generate", min(unknown), known)
    for name in given.keys() & ENUMS.keys():
        given[name] = enum_number(ENUMS[name], given[name], name)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if isinstance(given.get("bad_words"), str):
        raise TypeError(f"bad_words must be a list, got {given['bad_words']!r}")
    if "bad_words_token_ids" in given:
        given["bad_words_token_ids"] = [types_pb2.TokenIds(token_ids=word) for word in given["bad_words_token_ids"]]
    if "sources" in given:
        given["sources"] = _source_numbers(given["sources"])
    methods = [name for name in METHOD_MESSAGES if name in given]
    # They are fields of one `oneof`: protobuf would keep one and silently drop the others.
    if len(methods) > 1:
        raise TypeError(f"generate() got parameters of more than one method: {', '.join(methods)}")
    for name in methods:
        given[name] = method_message(name, given[name])
    retrieval = {field: given[name] for name, field in RETRIEVAL_FIELDS.items() if name in given}
    if retrieval:
        given["retrieval_params"] = types_pb2.RetrievalParams(**retrieval)
    speculation = _message_of(types_pb2.SpeculationParams, given)
    if given.get("as_published"):
        speculation = published(speculation or types_pb2.SpeculationParams())
    sent = prompt_message(prompt, cast(ChatOptions, {name: given[name] for name in given.keys() & CHAT_OPTIONS}))
    return verifier_pb2.GenerateRequest(
        prompt=sent,
        sampling=_message_of(types_pb2.SamplingParams, given),
        speculation=speculation,
        report=_message_of(verifier_pb2.ReportParams, given),
        resume_token_ids=given.get("resume_token_ids", ()),
        truncate_prompt_tokens=given.get("truncate_prompt_tokens"),
        n=given.get("n"),
        clamp_max_tokens=given.get("clamp_max_tokens"),
        prediction=given.get("prediction"),
        structured_outputs=_structured_outputs(given["structured_outputs"]) if "structured_outputs" in given else None,
        skip_special_tokens=given.get("skip_special_tokens"),
    )


def _structured_outputs(given: object) -> types_pb2.StructuredOutputs:
    """Returns the description of an output. Raises TypeError if there is none, or more than one."""
    known = [field.name for field in types_pb2.StructuredOutputs.DESCRIPTOR.oneofs_by_name["constraint"].fields]
    constraint = dict(given) if isinstance(given, Mapping) else {}
    more = {name: constraint.pop(name, None) for name in ("begins_after", "special_tokens_as_text")}
    if len(constraint) != 1 or not constraint.keys() <= set(known):
        raise TypeError(f"structured_outputs must have one of {', '.join(known)}, got {given!r}")
    ((kind, value),) = constraint.items()
    if kind == "json" and not isinstance(value, str):
        value = json.dumps(value)
    if kind == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"structured_outputs.choice must be a list, got {value!r}")
        value = types_pb2.Choices(choices=value)
    return types_pb2.StructuredOutputs(**{kind: value}, **more)


def _source_numbers(sources: object) -> list[int]:
    # A text is a sequence too, and would be taken apart letter by letter.
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise TypeError(f"sources must be a list, got {sources!r}")
    return [enum_number(types_pb2.Source.DESCRIPTOR, source, "sources") for source in sources]


def _message_of(kind: type[_M], given: Mapping[str, Any]) -> _M | None:
    """Returns a message of the values that are named like its fields; None without such values."""
    fields = {name: given[name] for name in given.keys() & kind.DESCRIPTOR.fields_by_name.keys()}
    return kind(**fields) if fields else None


_PROMPT_RULE = "prompt must be text, token ids, or messages with role and content"


def _unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Returns the error of an unknown keyword argument, in Python's words, with the one that was meant."""
    near = get_close_matches(name, known, n=1)
    meant = f": did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def prompt_message(prompt: Prompt, options: ChatOptions) -> verifier_pb2.Prompt:
    """Returns the prompt in the form that its type asks for; the options go with a chat only.

    Raises:
        TypeError: The prompt is anything else, something in it has the wrong type, or the options go with no chat.
        ValueError: The wire cannot hold a value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - CHAT_OPTIONS:
        raise _unexpected("tokenize", min(unknown), CHAT_OPTIONS)
    if isinstance(prompt, verifier_pb2.Prompt) and not given:
        return prompt
    if not isinstance(prompt, str | Iterable):
        raise TypeError(f"{_PROMPT_RULE}, got {type(prompt).__name__}")
    items = [] if isinstance(prompt, str) else list(prompt)
    if items and isinstance(items[0], (ChatMessage, Mapping)):
        return verifier_pb2.Prompt(chat=chat_messages(items, given))
    if given:
        raise TypeError(f"{min(given)} must be unset unless the prompt is a chat, a list of messages")
    if isinstance(prompt, str):
        return verifier_pb2.Prompt(text=sendable(prompt, "prompt"))
    # An empty list goes out as token ids: the server refuses an empty prompt, of whatever kind.
    return verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=_token_ids(items)))


def _token_ids(items: Iterable[object]) -> list[int]:
    try:
        # index() takes numpy's and torch's integers too, and refuses 1.0.
        return [operator.index(item) for item in items]  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(_PROMPT_RULE) from None


def method_message(field: str, params: Mapping[str, Any]) -> Message:
    """Returns a method's own parameters as their message. Enums may be given by name.

    Raises:
        TypeError: A parameter does not exist, or has the wrong type.
        ValueError: The wire cannot hold a value.
    """
    kind, fields = METHOD_MESSAGES[field], method_fields(field)
    if unknown := params.keys() - fields.keys():
        raise TypeError(f"{field} must have parameters of {', '.join(fields)} only, got {min(unknown)!r}")
    message = kind()
    for name, value in params.items():
        sent = _wire_value(fields[name], value, f"{field}.{name}")
        try:
            message.MergeFrom(kind(**{name: sent}))
        except (TypeError, ValueError) as error:  # protobuf says what is wrong, but not always with which field
            raise type(error)(f"{field}.{name}: {error}") from None
    return message


def method_fields(field: str) -> dict[str, FieldDescriptor]:
    """Returns a method's own parameters by name, in the protocol's order."""
    return {each.name: cast(FieldDescriptor, each) for each in METHOD_MESSAGES[field].DESCRIPTOR.fields}


def _wire_value(field: FieldDescriptor, value: Any, what: str) -> Any:
    if field.is_repeated and isinstance(value, str):
        raise TypeError(f"{what} must be a list, got {value!r}")  # protobuf would take it apart, letter by letter
    if field.enum_type is None:
        return value
    if field.is_repeated:
        return [enum_number(field.enum_type, item, what) for item in value]
    return enum_number(field.enum_type, value, what)
