"""Flags of the `outrider` command that several subcommands share. Unset means: the server's default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from outrider.core.params import Method
from outrider.security.tokens import token_from
from outrider_cli.failures import reported
from outrider_client.channel import SecurityOptions
from outrider_client.requests import METHOD_MESSAGES, method_message, method_params_help, parse_method_params

DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

_SAMPLING = "Sampling"
_SPECULATION = "Speculation (changes the speed, never the text)"
_MODELS = "Models"

Address = Annotated[
    str,
    typer.Option(
        envvar="OUTRIDER_ADDRESS",
        help="The verifier, HOST:PORT; several, with commas between them, are its replicas.",
        show_default=True,
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="No colours, no legend, no summary.")]
TimeoutS = Annotated[float | None, typer.Option(help="Deadline of a generation, in seconds.", min=0)]

Temperature = Annotated[float | None, typer.Option(help="Divides the logits; 0 = greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="Keeps the k most probable tokens; 0 = all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option(help="Keeps the most probable tokens that reach this probability.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Keeps tokens this probable, relative to the most probable one.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Same request and seed: same text.", metavar="<int>", min=0, max=2**64 - 1, rich_help_panel=_SAMPLING
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", help="Ends the generation. Can be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Goes on after end-of-sequence tokens.", rich_help_panel=_SAMPLING)
]

MethodOption = Annotated[
    Method | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help=f"How drafts are made: {', '.join(method.value for method in Method)}.",
        rich_help_panel=_SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None, typer.Option(help="Most tokens verified in one round.", rich_help_panel=_SPECULATION)
]
Lookahead = Annotated[
    int | None, typer.Option(help="Tokens drafted beyond the committed ones.", rich_help_panel=_SPECULATION)
]
MinPathProbability = Annotated[
    float | None,
    typer.Option(help="A chain ends where its probability falls below this.", rich_help_panel=_SPECULATION),
]
RowsOption = Annotated[
    Literal["chain", "tree"] | None,
    typer.Option(
        "--rows", help="What a target forward verifies: one path, or a sub-tree.", rich_help_panel=_SPECULATION
    ),
]
MaxRows = Annotated[
    int | None, typer.Option(help="Rows of a sub-tree; unset = as many as pay.", rich_help_panel=_SPECULATION)
]
AcceptanceRuleOption = Annotated[
    Literal["match", "ratio"] | None,
    typer.Option(
        "--acceptance-rule",
        help="Which drafted tokens are kept; ratio: the text depends on them.",
        rich_help_panel=_SPECULATION,
    ),
]
SharedNoise = Annotated[
    bool | None,
    typer.Option(
        "--shared-noise/--no-shared-noise", help="Ranks drafts with the target's noise.", rich_help_panel=_SPECULATION
    ),
]
AllowFallback = Annotated[
    bool,
    typer.Option("--allow-fallback", help="Takes another method if a peer is missing.", rich_help_panel=_SPECULATION),
]
MethodParam = Annotated[
    list[str] | None,
    typer.Option(
        "--method-param",
        metavar="NAME=VALUE",
        help="A parameter of the method itself; see below. Can be repeated.",
        rich_help_panel=_SPECULATION,
    ),
]
Retrieval = Annotated[
    bool | None,
    typer.Option("--retrieval/--no-retrieval", help="Adds retrieved continuations.", rich_help_panel=_SPECULATION),
]
RetrievalScope = Annotated[
    Literal["session", "tenant", "global"] | None,
    typer.Option(help="With whom retrieval shares.", rich_help_panel=_SPECULATION),
]
Contribute = Annotated[
    bool | None,
    typer.Option(
        "--contribute/--no-contribute", help="Lets the others of the scope retrieve this.", rich_help_panel=_SPECULATION
    ),
]

Target = Annotated[
    str, typer.Option(help="Target model: a demo name, a folder or a Hugging Face name.", rich_help_panel=_MODELS)
]
TargetDtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.", rich_help_panel=_MODELS)]
Draft = Annotated[str, typer.Option(help="Draft model; its tokenizer must be the target's.", rich_help_panel=_MODELS)]
DraftDtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.", rich_help_panel=_MODELS)]
Device = Annotated[str, typer.Option(help="Device of both models, like cpu or cuda:0.", rich_help_panel=_MODELS)]
NumThreads = Annotated[
    int, typer.Option(help="Threads of each model on a CPU; 0 = one a core.", min=0, rich_help_panel=_MODELS)
]
RedisUrl = Annotated[str | None, typer.Option(envvar="REDIS_URL", help="A Redis that runs already; unset = start one.")]
LogFolder = Annotated[Path | None, typer.Option(help="Keeps the logs here.", file_okay=False)]

METHOD_PARAMS_EPILOG = "\n\n".join(["Parameters for --method-param:", *method_params_help()])
"""What stands below the flags of a command that has `MethodParam`."""


def method_params(method: Method | None, pairs: list[str] | None) -> dict[str, Any]:
    """What --method-param says, as keyword arguments of `generate`. Wrong usage where it says nothing sensible."""
    try:
        params = parse_method_params(method, pairs or ())
        for name in params.keys() & METHOD_MESSAGES.keys():
            method_message(name, params[name])
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--method-param") from None
    return params


_PANEL = "Security"

_T = TypeVar("_T")


def _file(variable: str, text: str) -> Any:
    return typer.Option(envvar=variable, help=text, dir_okay=False, show_default=False, rich_help_panel=_PANEL)


TokenFile = Annotated[
    Path | None, _file("OUTRIDER_TOKEN_FILE", "File with the token to show to servers, as they ask for one.")
]
CaFile = Annotated[
    Path | None, _file("OUTRIDER_CA_FILE", "Who may have signed a server's certificate, PEM. Given: TLS.")
]
CertFile = Annotated[Path | None, _file("OUTRIDER_CERT_FILE", "Certificate to show to servers that ask for one, PEM.")]
KeyFile = Annotated[Path | None, _file("OUTRIDER_KEY_FILE", "Key of --cert-file, PEM.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Talks to other machines without TLS.", rich_help_panel=_PANEL)
]


def _security(
    *,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    insecure: Insecure = False,
) -> SecurityOptions:
    """What the flags say. Raises ValueError."""
    given = SecurityOptions(ca_file=ca_file, cert_file=cert_file, key_file=key_file, insecure=insecure)
    if token_file is not None:
        try:
            given["token"] = token_from([token_file.read_bytes()])
        except OSError as error:
            # Not str(error): who gives the token in place of the file's name should not find it in a log.
            raise ValueError(f"--token-file: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"--token-file: {error}") from None
    return given


_FLAGS = tuple(inspect.signature(_security, eval_str=True).parameters.values())


def secured(command: Callable[..., _T]) -> Callable[..., _T]:
    """Gives a command these flags. What they say is its argument `security`."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "security"]

    @wraps(command)
    def with_security(**arguments: Any) -> _T:
        flags = {flag.name: arguments.pop(flag.name) for flag in _FLAGS}
        with reported():
            security = _security(**flags)
        return command(**arguments, security=security)

    parameters = [*own, *_FLAGS]
    with_security.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_security.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_security
