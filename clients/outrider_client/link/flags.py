"""The settings of a link on the command lines of the links."""

from __future__ import annotations

import argparse
from dataclasses import fields

from outrider_client.link.line import BadSetting, LinkSettings

_HELP = {
    "delay_ms": "delay each way, in milliseconds",
    "jitter_ms": "at most so much more, in milliseconds; never reorders",
    "rate_up_mbit": "megabits a second towards the side that is dialled; 0 = no limit",
    "rate_down_mbit": "megabits a second on the way back; 0 = no limit",
    "loss": "part of the packets that is lost, each way",
}


def add_settings(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Adds a flag for each setting of a link but those."""
    for field in fields(LinkSettings):
        if field.name not in without:
            parser.add_argument(f"--{_dashed(field.name)}", type=float, default=field.default, help=_HELP[field.name])


def settings_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> LinkSettings:
    """The settings that the flags say. A wrong one ends the process with status 2 and a line that names it."""
    names = [field.name for field in fields(LinkSettings) if hasattr(options, field.name)]
    try:
        return LinkSettings(**{name: getattr(options, name) for name in names})
    except BadSetting as error:
        name, _, rule = str(error).partition(" ")
        parser.error(f"--{_dashed(name)} {rule}")


def flags_of(settings: LinkSettings) -> list[str]:
    """The flags that say these settings; what is 0 is left out."""
    given = [(field.name, getattr(settings, field.name)) for field in fields(settings)]
    return [word for name, value in given if value for word in (f"--{_dashed(name)}", str(value))]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
