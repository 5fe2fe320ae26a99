"""Flags that several commands share, each declared once. An unset one without a default means the server's default.

A command takes groups of flags as one argument: `@generating` gives it those of a generation as `options`, `@secured`
those of a connection as `security`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import typer
from google.protobuf.descriptor import FieldDescriptor

from outrider.core.methods import METHODS, MethodName
from outrider.core.params import SOURCES
from outrider.security.tokens import token_from
from outrider.v1 import types_pb2
from outrider_cli.failures import reported
from outrider_client.channel import DEFAULT_PORT as DEFAULT_PORT
from outrider_client.channel import SecurityOptions
from outrider_client.enums import enum_number
from outrider_client.requests import METHOD_MESSAGES, GenerateOptions, method_fields, method_message

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

_SAMPLING = "Sampling"
_REPORTS = "Reports (with --json)"
_SPECULATION = "Speculation (changes the speed, never the text)"
_MODELS = "Models"
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
Plain = Annotated[bool, typer.Option("--plain", help="No colours, no legend, no summary.")]

Target = Annotated[
    str, typer.Option(help="Target model: a demo name, a folder or a Hugging Face name.", rich_help_panel=_MODELS)
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


def _sampling(*names: str, text: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SAMPLING, **settings)


def _report(*names: str, text: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_REPORTS, **settings)


def _speculation(*names: str, text: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SPECULATION, **settings)


class GenerationFlags:
    """Declares the flags of a generation: a new parameter of the protocol gets its flag here and nowhere else.

    They are named as in `GenerateOptions`, and stand in the order of `--help`. None means unset.
    """

    timeout_s: Annotated[float | None, typer.Option(help="Deadline of a generation, in seconds.", min=0)]
    temperature: Annotated[
        float | None, _sampling(text="Divides the logits; 0 = greedy. Unset: the model's own, or 1.")
    ]
    top_k: Annotated[int | None, _sampling(text="Keeps the k most probable tokens; 0 = all.")]
    top_p: Annotated[float | None, _sampling(text="Keeps the most probable tokens that reach this probability.")]
    min_p: Annotated[float | None, _sampling(text="Keeps tokens this probable, relative to the most probable one.")]
    seed: Annotated[
        int | None, _sampling(text="Same request and seed: same text.", metavar="<int>", min=0, max=2**64 - 1)
    ]
    max_tokens: Annotated[int | None, _sampling(text="Most tokens to generate.")]
    clamp_max_tokens: Annotated[
        bool | None, _sampling("--clamp-max-tokens", text="Where there is room for less, generates less.")
    ]
    stop_token_ids: Annotated[
        list[int] | None, _sampling("--stop-token-id", text="Ends the generation. Can be repeated.")
    ]
    ignore_eos: Annotated[bool | None, _sampling("--ignore-eos", text="Goes on after end-of-sequence tokens.")]
    stop: Annotated[list[str] | None, _sampling("--stop", text="String that ends the text. Can be repeated.")]
    include_stop_str_in_output: Annotated[
        bool | None, _sampling("--include-stop-str-in-output", text="Has the text end with the stop string.")
    ]
    min_tokens: Annotated[int | None, _sampling(text="Least tokens before anything stops the text.")]
    repetition_penalty: Annotated[float | None, _sampling(text="Above 1: tokens of prompt and text get rarer.")]
    presence_penalty: Annotated[float | None, _sampling(text="Taken off tokens that the text has; -2 to 2.")]
    frequency_penalty: Annotated[float | None, _sampling(text="The same for each time that it has them; -2 to 2.")]
    logit_bias: Annotated[
        list[str] | None,
        _sampling("--logit-bias", metavar="TOKEN_ID=BIAS", text="Added to a token's logit. Can be repeated."),
    ]
    bad_words: Annotated[
        list[str] | None, _sampling("--bad-word", text="Word that the text must not have. Can be repeated.")
    ]
    bad_words_token_ids: Annotated[
        list[str] | None,
        _sampling("--bad-word-token-ids", metavar="ID,ID", text="The same by token ids. Can be repeated."),
    ]
    skip_special_tokens: Annotated[
        bool | None,
        _sampling("--skip-special-tokens/--no-skip-special-tokens", text="Leaves special tokens out of the text."),
    ]
    json_schema: Annotated[
        str | None,
        _sampling("--json-schema", metavar="JSON|@FILE", text="JSON schema that the text must obey."),
    ]
    regex: Annotated[str | None, _sampling("--regex", text="Regular expression that the whole text must match.")]
    grammar: Annotated[
        str | None,
        _sampling("--grammar", metavar="TEXT|@FILE", text="Grammar that the text must obey, in Lark or GBNF."),
    ]
    choice: Annotated[list[str] | None, _sampling("--choice", text="Text to choose. Can be repeated.")]
    structure_begins_after: Annotated[
        str | None, _sampling(metavar="TEXT", text="These four hold behind this text only, like </think>.")
    ]
    truncate_prompt_tokens: Annotated[int | None, _sampling(text="Keeps the last tokens of the prompt, so many.")]
    n: Annotated[int | None, _sampling("--n", text="Texts of one prompt, which is read once.")]
    logprobs: Annotated[int | None, _report(text="Log-probability of each token, and of so many beside it.")]
    prompt_logprobs: Annotated[int | None, _report(text="The same of the prompt.")]
    logprobs_mode: Annotated[
        Literal["raw-logprobs", "raw-logits", "processed-logprobs", "processed-logits"] | None,
        _report("--logprobs-mode", text="Before temperature, penalties and filters (raw), or after; or logits."),
    ]
    echo: Annotated[bool | None, _report("--echo", text="The prompt as the target reads it.")]
    rounds: Annotated[bool | None, _report("--rounds", text="What each round did.")]
    trees: Annotated[bool | None, _report("--trees", text="What each round verified, beside what it did.")]
    text_ends: Annotated[bool | None, _report("--text-ends", text="Where the text of each token ends.")]
    method: Annotated[
        MethodName | None,
        _speculation(
            "--method",
            metavar="NAME",
            text=f"How drafts are made: {', '.join(METHODS)}.",
        ),
    ]
    num_speculative_tokens: Annotated[int | None, _speculation(text="Most tokens verified in one round.")]
    lookahead: Annotated[int | None, _speculation(text="Tokens drafted beyond the committed ones.")]
    min_path_probability: Annotated[
        float | None, _speculation(text="A chain ends where its probability falls below this.")
    ]
    retrieval: Annotated[bool | None, _speculation("--retrieval/--no-retrieval", text="Adds retrieved continuations.")]
    retrieval_scope: Annotated[
        Literal["session", "tenant", "global"] | None, _speculation(text="With whom retrieval shares.")
    ]
    prediction: Annotated[
        str | None,
        _speculation("--prediction", metavar="TEXT|@FILE", text="Text that the output probably repeats parts of."),
    ]
    contribute: Annotated[
        bool | None,
        _speculation("--contribute/--no-contribute", text="Lets the others of the scope retrieve this."),
    ]
    sources: Annotated[
        str | None,
        _speculation(
            "--sources",
            metavar="NAME,NAME",
            text=f"Where retrieval looks, the preferred first: {', '.join(each.name.lower() for each in SOURCES)}.",
        ),
    ]
    rows: Annotated[
        Literal["chain", "tree"] | None,
        _speculation("--rows", text="What a target forward verifies: one path, or a sub-tree."),
    ]
    max_rows: Annotated[int | None, _speculation(text="Rows of a sub-tree; unset = as many as pay.")]
    acceptance_rule: Annotated[
        Literal["match", "ratio"] | None,
        _speculation("--acceptance-rule", text="Which drafted tokens are kept; ratio: the text depends on them."),
    ]
    shared_noise: Annotated[
        bool | None,
        _speculation("--shared-noise/--no-shared-noise", text="Ranks drafts with the target's noise."),
    ]
    calibration: Annotated[
        bool | None,
        _speculation("--calibration/--no-calibration", text="Scores drafts by how often the target has agreed."),
    ]
    as_published: Annotated[
        bool | None,
        _speculation("--as-published", text="The method as its paper has it, without what Outrider adds."),
    ]
    allow_fallback: Annotated[
        bool | None, _speculation("--allow-fallback", text="Takes another method if a peer is missing.")
    ]
    method_param: Annotated[
        list[str] | None,
        _speculation(
            "--method-param", metavar="NAME=VALUE", text="A parameter of the method itself; see below. Can be repeated."
        ),
    ]


NEED_JSON = ("logprobs", "prompt_logprobs", "logprobs_mode", "echo", "rounds", "trees", "text_ends")
"""Options of what is told beside a text, for which a terminal has no place."""


def generating(*, without: Sequence[str] = (), **defaults: object) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Returns a decorator that gives a command the flags of a generation. Its argument `options` gets their values.

    Args:
        without: Flags that the command does not have, as `GenerationFlags` names them.
        **defaults: Values of flags that the user leaves unset; None where nothing is named here.
    """
    # `eval_str`: `from __future__ import annotations` has made texts of the annotations.
    declared = inspect.get_annotations(GenerationFlags, eval_str=True)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in declared.items()
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
    """Returns a text, or that of the file that it names behind an @. Ends the command if there is none."""
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
        raise typer.BadParameter(f"must be ID,ID, got {text!r}", param_hint="--bad-word-token-ids") from None


def _source_name(text: str) -> str:
    """Returns the name of a source. Ends the command as wrong usage if there is none of this name."""
    name = text.strip()
    try:
        enum_number(types_pb2.Source.DESCRIPTOR, name, "sources")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sources") from None
    return name


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


def refuse_given(context: typer.Context, names: Iterable[str], rule: str) -> None:
    """Raises ValueError if one of these flags was given, which would do nothing: `rule` says so."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
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
    # What is left are numbers: no method has a parameter that is a text.
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
