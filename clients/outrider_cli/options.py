"""Flags that several commands share, each declared once. An unset one without a default means the server's default.

A command takes groups of flags as one argument: `@generating` gives it those of a generation as `options`, `@secured`
those of a connection as `security`.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from google.protobuf.descriptor import FieldDescriptor

from outrider.core.methods import METHODS, MethodName
from outrider.core.params import SOURCES
from outrider.security.tokens import token_from
from outrider.v1 import types_pb2
from outrider.v1.types_pb2 import SpeculationParams
from outrider.v1.verifier_pb2 import ReportParams
from outrider_cli.failures import flag_of, reported
from outrider_client.channel import DEFAULT_PORT as DEFAULT_PORT
from outrider_client.channel import SecurityOptions
from outrider_client.chats import CHAT_OPTIONS
from outrider_client.enums import enum_name, enum_number
from outrider_client.requests import (
    ENUMS,
    METHOD_MESSAGES,
    RETRIEVAL_FIELDS,
    GenerateOptions,
    method_fields,
    method_message,
)

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_HTTP_PORT = 8000

_SAMPLING = "Sampling"
_REPORTS = "Reports (with --json)"
_SPECULATION = "Speculation (changes the speed, never the text)"
_MODELS = "Models"
_GROUPS = (None, _SAMPLING, _REPORTS, _SPECULATION)
"""Headings of the flags of a generation, in the order of `--help`; None is that of the command's own flags."""
_SECURITY = "Security"

_T = TypeVar("_T")

Address = Annotated[
    str,
    typer.Option(
        envvar="OUTRIDER_ADDRESS",
        help="The verifier, HOST:PORT; several, with commas between them, are its replicas.",
        show_default=True,
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="The text alone: no colours, no legend, no summary.")]
Stats = Annotated[bool, typer.Option("--stats", help="What speculation did, before the summary.")]

Target = Annotated[
    str,
    typer.Option(help="Target model: a demo name, folder, GGUF file or Hugging Face name.", rich_help_panel=_MODELS),
]
Dtype = Literal["auto", "bfloat16", "float32"]
TargetDtype = Annotated[Dtype, typer.Option(help="Target model's numbers.", rich_help_panel=_MODELS)]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model with the target's tokenizer; unset = none, but for a demo target.",
        rich_help_panel=_MODELS,
        show_default=False,
    ),
]
DraftDtype = Annotated[
    Dtype | None, typer.Option(help="Draft model's numbers; unset = by device.", rich_help_panel=_MODELS)
]
Drafter = Annotated[
    Literal["speculator", "in-process"],
    typer.Option(help="Where the draft model runs; in-process: the verifier's.", rich_help_panel=_MODELS),
]
Device = Annotated[str, typer.Option(help="Device of both models, like cpu or cuda:0.", rich_help_panel=_MODELS)]
NumThreads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads of each model; unset = cores are shared out, 0 = all.",
        min=0,
        rich_help_panel=_MODELS,
        show_default=False,
    ),
]
RedisUrl = Annotated[str | None, typer.Option(envvar="REDIS_URL", help="A Redis that runs already; unset = start one.")]
LogFolder = Annotated[Path | None, typer.Option(help="Keeps the logs here.", file_okay=False)]


NEED_JSON = tuple(field.name for field in ReportParams.DESCRIPTOR.fields)
"""Options that ask for reports next to a text, for which a terminal has no place."""
_WITHOUT_FLAGS = {
    *("resume", "resume_token_ids", "resume_timeout_s", "stall_timeout_s", "structured_outputs"),
    *(METHOD_MESSAGES.keys() | CHAT_OPTIONS),
}
"""Options that are for programs, or are given by other flags."""
_WRITTEN: dict[str, tuple[Any, str]] = {
    "logit_bias": (list[str], "TOKEN_ID=BIAS"),
    "bad_words_token_ids": (list[str], "ID,ID"),
    "sources": (str, "NAME,NAME"),
    "prediction": (str, "TEXT|@FILE"),
}
"""Types and forms of options that have a notation of their own on the command line."""
_HELPS = {
    "temperature": "Divides the logits; 0 = greedy. Unset: the model's own, or 1.",
    "method": f"How drafts are made: {', '.join(METHODS)}.",
    "sources": f"Where retrieval looks, the preferred first: {', '.join(each.name.lower() for each in SOURCES)}.",
    "logprobs_mode": "Before temperature, penalties and filters (raw), or after; or logits.",
}
"""Descriptions that the SDK has in other words."""
_MADE_UP: dict[str, tuple[Any, str, str | None]] = {
    "json_schema": (str, "JSON schema that the text must obey.", "JSON|@FILE"),
    "regex": (str, "Regular expression that the whole text must match.", None),
    "grammar": (str, "Grammar that the text must obey, in Lark or GBNF.", "TEXT|@FILE"),
    "choice": (list[str], "Text to choose.", None),
    "structure_begins_after": (str, "These four hold after this text only, like </think>.", "TEXT"),
    "method_param": (list[str], "A parameter of the method itself; see below.", "NAME=VALUE"),
}
"""Types, descriptions and forms of flags whose name no option of the SDK has."""


@cache
def generation_flags() -> dict[str, Any]:
    """Returns the annotated type of each flag of a generation, by its argument's name, in the order of `--help`.

    `GenerateOptions` declares them: a parameter that is added there is a flag at once. Names, types and descriptions
    are those of the SDK, choices and ranges those of the wire. None means unset.
    """
    hints, texts = get_type_hints(GenerateOptions), _described(GenerateOptions)
    flags: dict[str, Any] = {}
    for name in (name for name in GenerateOptions.__annotations__ if name not in _WITHOUT_FLAGS):
        kind, form = _WRITTEN.get(name) or (_type_of(name, hints[name]), None)
        flags[name] = _flag(name, kind, _HELPS.get(name, texts[name]), "NAME" if name == "method" else form)
    flags |= {name: _flag(name, *declared) for name, declared in _MADE_UP.items()}
    return dict(sorted(flags.items(), key=lambda flag: _GROUPS.index(_group_of(flag[0]))))


def _described(declaring: type) -> dict[str, str]:
    """Returns the first sentence of the docstring of each attribute of a class, with flags in place of options."""
    [declared] = ast.parse(inspect.getsource(declaring)).body
    assert isinstance(declared, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in pairwise(declared.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                sentence = re.split(r"\.(?: |$)|: `", " ".join(doc.split()), maxsplit=1)[0]
                texts[name] = re.sub(r"`(\w+)`", lambda option: flag_of(option[1]), sentence) + "."
    return texts


def _type_of(name: str, hint: Any) -> Any:
    """Returns the type of a flag: that of the option, for a command line."""
    if name == "method":
        return MethodName
    if name in ENUMS:
        numbers = (number for number in ENUMS[name].values_by_number if number)
        return Literal[tuple(enum_name(ENUMS[name], number) for number in numbers)]
    kinds = get_args(hint)
    for kind in (bool, int, float):
        if kind in kinds:
            return kind
    return list[int] if Sequence[int] in kinds else list[str] if Sequence[str] in kinds else str


def _flag(name: str, kind: Any, text: str, form: str | None) -> Any:
    flag, more = flag_of(name), dict[str, Any](metavar=form)
    if kind is bool:
        flag += f"/--no-{flag[2:]}"
    if get_origin(kind) is list:
        text += " Can be repeated."
    if name == "seed":
        more |= {"min": 0, "max": 2**64 - 1}
    return Annotated[kind | None, typer.Option(flag, help=text, rich_help_panel=_group_of(name), **more)]


def _group_of(name: str) -> str | None:
    """Returns the heading of a flag's group: that of the message which has the option on the wire."""
    if name == "timeout_s":
        return None
    if name in NEED_JSON:
        return _REPORTS
    others = {*RETRIEVAL_FIELDS, "as_published", "prediction", "method_param"}
    is_speculation = name in SpeculationParams.DESCRIPTOR.fields_by_name or name in others
    return _SPECULATION if is_speculation else _SAMPLING


def generating(*, without: Sequence[str] = (), **defaults: object) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Returns a decorator that gives a command the flags of a generation. Its argument `options` gets their values.

    Args:
        without: Flags that the command does not have, as `generation_flags` names them.
        **defaults: Values of flags that the user leaves unset; None where nothing is named here.
    """
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in generation_flags().items()
        if name not in without
    ]

    def decorate(command: Callable[..., _T]) -> Callable[..., _T]:
        return with_flags(command, "options", flags, _generation)

    return decorate


def _generation(
    method_param: list[str] | None = None,
    sources: str | None = None,
    logit_bias: list[str] | None = None,
    bad_words_token_ids: list[str] | None = None,
    prediction: str | None = None,
    json_schema: str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choice: list[str] | None = None,
    structure_begins_after: str | None = None,
    **flags: Any,
) -> GenerateOptions:
    # typer makes an empty list of a flag that can be repeated and was not given.
    flags = {name: value for name, value in flags.items() if value != []}
    given = {**flags, **_method_params(flags.get("method"), method_param or ())}
    structures = {
        "json": _text("--json-schema", json_schema),
        "regex": regex,
        "grammar": _text("--grammar", grammar),
        "choice": choice or None,
    }
    structures = {kind: value for kind, value in structures.items() if value is not None}
    flags_of_kinds = "--json-schema, --regex, --grammar and --choice"
    if len(structures) > 1:
        raise typer.BadParameter(f"only one of {flags_of_kinds} may be given")
    if structures:
        given["structured_outputs"] = {**structures, "begins_after": structure_begins_after}
    elif structure_begins_after is not None:
        raise typer.BadParameter(f"--structure-begins-after needs one of {flags_of_kinds}")
    if logit_bias:
        given["logit_bias"] = dict(map(_bias, logit_bias))
    if bad_words_token_ids:
        given["bad_words_token_ids"] = [_word(text) for text in bad_words_token_ids]
    if prediction is not None:
        given["prediction"] = _text("--prediction", prediction)
    if sources is not None:
        given["sources"] = [_source_name(name) for name in sources.split(",")]
    return cast(GenerateOptions, given)


def _text(flag: str, value: str | None) -> str | None:
    """Returns a text, or that of the file that it names after an @. Ends the command if there is none."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {value[1:]}: {error.strerror}", param_hint=flag) from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{value[1:]} is not UTF-8 (byte {error.start})", param_hint=flag) from None


def _bias(pair: str) -> tuple[int, float]:
    """Returns a token id and its bias. Ends the command as wrong usage if the text is not TOKEN_ID=BIAS."""
    token_id, _, bias = pair.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise typer.BadParameter(f"must be TOKEN_ID=BIAS, got {pair!r}", param_hint="--logit-bias") from None


def _word(text: str) -> list[int]:
    """Returns the token ids of a word. Ends the command as wrong usage if the text is not ID,ID."""
    try:
        return [int(token_id) for token_id in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"must be ID,ID, got {text!r}", param_hint="--bad-words-token-ids") from None


def _source_name(text: str) -> str:
    """Returns the name of a source. Ends the command as wrong usage if there is none of this name."""
    name = text.strip()
    try:
        enum_number(types_pb2.Source.DESCRIPTOR, name, "sources")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sources") from None
    return name


def address_flag(address: str) -> str:
    """Returns the flag with which a command reaches these verifiers, after a space; empty if it needs none."""
    return "" if address == (os.environ.get("OUTRIDER_ADDRESS") or DEFAULT_ADDRESS) else f" --address {address}"


def _file(variable: str, text: str) -> Any:
    return typer.Option(envvar=variable, help=text, dir_okay=False, show_default=False, rich_help_panel=_SECURITY)


TokenFile = Annotated[
    Path | None, _file("OUTRIDER_TOKEN_FILE", "File with the token to show to servers, as they ask for one.")
]
CaFile = Annotated[
    Path | None, _file("OUTRIDER_CA_FILE", "Who may have signed a server's certificate, PEM. Given: TLS.")
]
CertFile = Annotated[Path | None, _file("OUTRIDER_CERT_FILE", "Certificate to show to servers that ask for one, PEM.")]
KeyFile = Annotated[Path | None, _file("OUTRIDER_KEY_FILE", "Key of --cert-file, PEM.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Talks to other machines without TLS.", rich_help_panel=_SECURITY)
]


def secured(command: Callable[..., _T]) -> Callable[..., _T]:
    """Gives a command the flags of a secured connection. Its argument `security` gets their values."""
    flags = list(inspect.signature(_security, eval_str=True).parameters.values())
    return with_flags(command, "security", flags, _security)


def _security(
    *,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    insecure: Insecure = False,
) -> SecurityOptions:
    """Returns the options that the flags stand for. Raises ValueError for an unusable token."""
    given = SecurityOptions(ca_file=ca_file, cert_file=cert_file, key_file=key_file, insecure=insecure)
    if token_file is not None:
        try:
            given["token"] = token_from([token_file.read_bytes()])
        except OSError as error:
            # Not str(error): a user who gives the token in place of the file's name should not find it in a log.
            raise ValueError(f"--token-file: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"--token-file: {error}") from None
    return given


def is_given(context: typer.Context, name: str) -> bool:
    """Returns True if a flag stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, names: Iterable[str], rule: str) -> None:
    """Raises ValueError if one of these flags was given, which would do nothing: `rule` says so."""
    for name in names:
        if is_given(context, name):
            # Without its value: there may be a password in that.
            raise ValueError(f"--{name.replace('_', '-')} must be {rule}")


def with_flags(
    command: Callable[..., _T], argument: str, flags: Sequence[inspect.Parameter], value_of: Callable[..., Any]
) -> Callable[..., _T]:
    """Returns a command that has flags in place of one argument.

    Args:
        command: The command; typer reads its signature.
        argument: The argument that gets what `value_of` makes of the flags.
        flags: The flags, as parameters of a signature.
        value_of: Called with the flags by name. Its ValueErrors are wrong usage.
    """
    signature = inspect.signature(command, eval_str=True)

    @wraps(command)
    def flagged(**arguments: Any) -> _T:
        given = {flag.name: arguments.pop(flag.name) for flag in flags}
        with reported():
            value = value_of(**given)
        return command(**arguments, **{argument: value})

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        # In the argument's place: `--help` lists the flags in the order of the signature.
        parameters += flags if parameter.name == argument else [parameter]
    flagged.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # typer asks for the type hints too, which are read from the annotations, not from the signature.
    flagged.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flagged


def _method_params(method: str | None, pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns --method-param as keyword arguments of `generate`. Ends the command as wrong usage if they are wrong."""
    try:
        params = parse_method_params(method, pairs)
        for name, given in params.items():
            method_message(name, given)  # only for its errors, which here can still name the flag
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--method-param") from None
    return params


def parse_method_params(method: str | None, pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the flags NAME=VALUE of a method as keyword arguments of `generate`: {"card": {"beam_width": 50}}.

    Raises ValueError, naming the parameter, the rule and the value.
    """
    if not pairs:
        return {}
    # A method's parameters are the field of SpeculationParams that has the method's name.
    field = METHODS[method].field if method is not None else ""
    if field not in METHOD_MESSAGES:
        names = ", ".join(name.replace("_", "-") for name in METHOD_MESSAGES)
        raise ValueError(f"needs a --method with parameters of its own ({names}), got {pairs[0]!r}")
    fields = method_fields(field)
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
        # Not `bool`: to it every text is true, "false" included.
        if text not in ("true", "false"):
            raise ValueError(f"{field.name} must be true or false, got {text!r}")
        return text == "true"
    # All others are numbers: no method has a parameter that is a text.
    kind, rule = (float, "a number") if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else (int, "a whole number")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{field.name} must be {rule}, got {text!r}") from None


def _method_params_help() -> Iterator[str]:
    """Yields a line for each method that has parameters."""
    for field in METHOD_MESSAGES:
        yield f"{field.replace('_', '-')}: {', '.join(method_fields(field))}"


METHOD_PARAMS_EPILOG = "\n\n".join(["Parameters for --method-param:", *_method_params_help()])
"""Stands below the flags of a command that has --method-param."""
