"""The group of all commands: its part of --help, and what is wrong with a command line, in words."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperGroup

_WORDS = ((re.compile(r"^Value error, "), ""), (re.compile(r"^Input should be "), "must be "))
"""Words that pydantic puts before the rule of a value, and those to say in their place."""


class CommandGroup(TyperGroup):
    """A group whose --help tells what each command does, not cut short."""

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Writes the commands, each with the first paragraph of its help."""
        with formatter.section("Commands"):
            rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
            formatter.write_dl(rows)

    def invoke(self, context: Any) -> Any:
        """Runs the command that the line names. A value that its flag does not take is told in plain words."""
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            for pattern, words in _WORDS:
                error.message = pattern.sub(words, error.message)
            raise
