"""The file of `--config`, in TOML: a section for each service, whose keys are that service's flags.

Flags of the command line come before variables of the environment, and these before the file. Errors in a file are
reported before anything starts, with the section, the key and the rule.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from outrider.telemetry.redaction import without_secrets
from outrider_cli.failures import in_plain_words, reported
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LOOPBACK
from outrider_cli.options import is_given

Sections = dict[str, dict[str, Any]]
Flags = Mapping[str, Sequence[str]]
"""By flag of a command, the keys that it stands for, as "SECTION.KEY". The first key is the flag's default."""

SETTINGS = {
    **{
        name: (f"outrider.{name}.settings", f"{name.title()}Settings")
        for name in ("verifier", "speculator", "datastore", "edge")
    },
    "gateway": ("outrider_gateway.settings", "GatewaySettings"),
}
"""Module and class of the settings of each service. Imported only for a file: they import what servers need."""
_OF_TLS = ("tls_cert", "tls_key", "tls_client_ca")
_DECIDED = {
    "verifier": ("speculator", "datastore", "draft_model", "draft_dtype", *_OF_TLS),
    "speculator": ("listen", "datastore", "credentials", *_OF_TLS),
    "datastore": ("listen", "credentials", *_OF_TLS),
    "gateway": ("upstream", "lab_socket", *_OF_TLS),
    "edge": ("credentials", *_OF_TLS),
}
"""Keys of a service that the command decides: it dials its services on this machine, without TLS."""
_PARTS = {"host": 0, "http_port": 2, "port": 2}
"""Flags that are one part of an address, HOST:PORT, and its index in `rpartition(":")`."""


@dataclass(frozen=True)
class ConfigFile:
    """Holds the sections of a file, by the names of settings; none without a file."""

    flags: Flags
    sections: Sections = field(default_factory=dict)

    def defaults(self, command: str) -> dict[str, Any]:
        """Returns the defaults of a command's flags, including those in the command's own section."""
        own = {} if command in SETTINGS else dict(self.sections.get(command, {}))
        for flag, keys in self.flags.items():
            service, _, name = keys[0].partition(".")
            if (value := self.sections.get(service, {}).get(name)) is not None:
                own[flag] = value.rpartition(":")[_PARTS[flag]].strip("[]") if flag in _PARTS else value
        return own

    def arguments(self, service: str, context: typer.Context) -> tuple[str, ...]:
        """Returns the flags of a service that only the file gives: neither the command line nor the environment."""
        passed_on = {keys[0] for keys in self.flags.values()}
        passed_on |= {key for flag, keys in self.flags.items() if is_given(context, flag) for key in keys}
        return tuple(
            _argument(name, value)
            for name, value in self.sections.get(service, {}).items()
            if f"{service}.{name}" not in passed_on and f"OUTRIDER_{service}_{name}".upper() not in os.environ
        )


def config_option(flags: Flags) -> Any:
    """Returns the option --config of a command. It sets the command's `context.obj` to the ConfigFile."""

    def read(context: typer.Context, path: Path | None) -> Path | None:
        context.obj = ConfigFile(flags)
        if path is not None:
            with reported():
                sections = _sections(path, context, flags)
                context.obj = ConfigFile(flags, sections)
                context.default_map = context.obj.defaults(context.command.name or "")
        return path

    text = "TOML with a section for each service, of its flags; those of the command line come first."
    return typer.Option("--config", callback=read, is_eager=True, metavar="FILE", help=text, show_default=False)


def _sections(path: Path, context: typer.Context, flags: Flags) -> Sections:
    """Returns the sections of a file. Raises ValueError with a line for each error."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a TOMLDecodeError, or bytes that are not UTF-8
        raise ValueError(f"--config: {path}: {getattr(error, 'strerror', None) or error}") from None
    names = [*SETTINGS, "up"]
    sections: Sections = {}
    wrong: list[str] = []
    for name, section in document.items():
        if name not in names:
            wrong.append(f"[{name}]: there is no such section{_meant(name, names, 'they are ' + ', '.join(names))}")
        elif not isinstance(section, dict):
            wrong.append(f"{name}: must be a section, [{name}], got {section!r}")
        else:
            sections[name] = {key.replace("-", "_"): value for key, value in section.items()}
            found = [] if len(sections[name]) == len(section) else ["a key is given twice, with - and with _"]
            if name in SETTINGS:
                found += _wrong_in_service(name, sections[name], context)
            elif name == context.command.name:
                found += _wrong_in_command(sections[name], context, flags)
            wrong += [f"[{name}] {each}" for each in found]
    if wrong:
        raise ValueError("\n".join(f"{path}: {each}" for each in wrong))
    return sections


def _wrong_in_service(service: str, section: dict[str, Any], context: typer.Context) -> Iterator[str]:
    """Yields what is wrong with a section of a service: key, rule and value."""
    module, name = SETTINGS[service]
    try:
        settings = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise ProcessFailed(f"{error.name} is not installed: pip install -e '.[demo]'") from None
    known = settings.model_fields
    yield from _unknown(section, known)
    command = "edge" if service == "edge" else "up"
    for key in [key for key in section if key in _DECIDED[service] and command == context.command.name]:
        yield f"{key.replace('_', '-')}: must be left out, as `outrider {command}` decides it"
    given = {key: value for key, value in section.items() if key in known}
    # They would be wrong as flags: a switch has no value, and any other flag has one.
    for key in [key for key, value in given.items() if isinstance(value, bool) is not (known[key].annotation is bool)]:
        rule = "true or false" if known[key].annotation is bool else "a value"
        yield f"{key.replace('_', '-')}: must be {rule}, got {given.pop(key)!r}"
    try:
        settings(**given)
    except ValueError as error:  # pydantic's ValidationError, whose class is not at hand here
        for item in error.errors() if hasattr(error, "errors") else ():
            # Only keys of the file count: other settings may come from elsewhere, and are not known here.
            if item["loc"] and (key := str(item["loc"][0])) in given:
                got = f", got {given[key]!r}" if known[key].repr else ""
                yield without_secrets(f"{key.replace('_', '-')}: {in_plain_words(item['msg'])}{got}")
    host = str(given.get("listen", LOOPBACK)).rpartition(":")[0]
    if service == "verifier" and host not in ("", LOOPBACK) and command == context.command.name:
        yield f"listen: must be {LOOPBACK}:PORT, where the other services dial it, got {given['listen']!r}"


def _wrong_in_command(section: dict[str, Any], context: typer.Context, flags: Flags) -> Iterator[str]:
    """Yields what is wrong with a command's own section: key, rule and value. It has the flags of no service."""
    known = {each.name: each for each in context.command.params if each.name and not each.is_eager}
    yield from _unknown(section, known)
    for key in [key for key in section if key in flags]:
        service, _, name = flags[key][0].partition(".")
        yield f"{key.replace('_', '-')}: must be left out: it is {name.replace('_', '-')} of [{service}]"
    for key in [key for key in section if key in known and key not in flags]:
        try:
            known[key].process_value(context, section[key])
        except typer.BadParameter as error:
            yield f"{key.replace('_', '-')}: {in_plain_words(error.message)}"


def _unknown(section: dict[str, Any], known: Collection[str]) -> Iterator[str]:
    for key in section:
        if key not in known:
            flag = key.replace("_", "-")
            meant = _meant(flag, [name.replace("_", "-") for name in known], "--help-all of the service lists all")
            yield f"{flag}: there is no such flag{meant}"


def _meant(given: str, known: Iterable[str], otherwise: str) -> str:
    near = get_close_matches(given, known, n=1)
    return f": did you mean {near[0]}?" if near else f": {otherwise}"


def _argument(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"
