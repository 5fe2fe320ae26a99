"""The --help of a service: groups of flags in 80 columns, the most needed first. --help-all also has the others."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from inspect import get_annotations
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

ALL = "--help-all"
HELPS = ("-h", "--help", ALL)
WIDTH = 80
FLAG_WIDTH = 30
"""Width of the column of flags. Descriptions begin after it."""
FIRST_FLAGS = frozenset({"listen", "model", "device", "dtype", "log_level", "metrics_listen"})
"""Flags of every process that --help shows; other flags that a service has not declared itself are for experts."""
SHARED = ("outrider.server.", "outrider.security.")
"""Modules of the settings that services share."""
_RULES = ((Ge, "ge", "at least"), (Gt, "gt", "more than"), (Le, "le", "at most"), (Lt, "lt", "less than"))


def help_of(settings: type[BaseSettings], *, is_whole: bool) -> str:
    """Returns the text. `is_whole`: True to include the flags for experts."""
    doc = " ".join((settings.__doc__ or "").split())
    lines = [f"Usage: {settings.model_config.get('cli_prog_name')} [FLAGS]", "", *textwrap.wrap(doc, WIDTH)]
    for title, names in _groups(settings, is_whole=is_whole).items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += _flag(name, settings.model_fields[name])
    return "\n".join([*lines, "", f"{HELPS[1]} shows the flags that most need; {ALL} has every one."])


def _groups(settings: type[BaseSettings], *, is_whole: bool) -> dict[str, list[str]]:
    """Returns the names of fields by group, the most needed first."""
    own: list[str] = []
    groups: dict[str, list[str]] = {"First": [], "Its own": own, "Peers": [], "TLS and callers": [], "More": []}
    for name in settings.model_fields:
        # The first class in order that declares it: a service may give a common flag another default.
        declaring = [each for each in settings.__mro__ if name in get_annotations(each)]
        if name in FIRST_FLAGS:
            groups["First"].append(name)
        elif not declaring[-1].__module__.startswith(SHARED):
            own.append(name)
        elif is_whole:
            is_of_security = declaring[-1].__module__.startswith("outrider.security.")
            title = "Peers" if name.startswith("peer_") else "TLS and callers" if is_of_security else "More"
            groups[title].append(name)
    return {title: names for title, names in groups.items() if names}


def _flag(name: str, field: FieldInfo) -> Iterator[str]:
    """Yields the lines of one flag: its name, and next to it its description."""
    flag = f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        flag += f", --no-{flag[2:]}"
    elif field.annotation in (int, float):
        flag += " N"
    else:
        flag += " TEXT"
    indent = " " * (FLAG_WIDTH + 2)
    described = textwrap.wrap(_description(field), WIDTH - len(indent))
    if len(flag) + 4 > len(indent):
        yield f"  {flag}"
    else:
        yield f"{'  ' + flag:<{len(indent)}}{described.pop(0)}"
    yield from (indent + line for line in described)


def _description(field: FieldInfo) -> str:
    notes = []
    if get_origin(field.annotation) is Literal:
        notes.append(" or ".join(map(str, get_args(field.annotation))))
    for kind, bound, words in _RULES:
        notes += [f"{words} {getattr(rule, bound):g}" for rule in field.metadata if isinstance(rule, kind)]
    if field.default not in ("", None) and field.annotation is not bool:
        is_number = isinstance(field.default, float)
        notes.append(f"default: {field.default:g}" if is_number else f"default: {field.default}")
    elif field.default is True:
        notes.append("default: yes")
    return f"{field.description or ''} [{'; '.join(notes)}]" if notes else field.description or ""
