"""Flags with which a command proves who it is, and knows whom it talks to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from outrider.rpc.security.peer_channel import token_from
from outrider_client.channel_security import SecurityOptions
from outrider_client.failures import reported

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
