"""The group of all suites: finds the one that a command line names, and reports errors in one line."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from outrider_cli.failures import WRONG_USAGE, in_flags
from outrider_cli.help import CommandGroup
from outrider_cli.prompts import PromptError
from outrider_client.channel import PlaintextRefused


class SuiteGroup(CommandGroup):
    """Finds the subcommand."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """See CommandGroup; an error in a suite or a flag is one line."""
        with checked():
            if arguments and not arguments[0].startswith("-"):
                self._check_suite("the suite", arguments[0])
                self._check_flags(arguments[0], arguments[1:])
        return list(super().parse_args(context, arguments))

    def _check_suite(self, name: str, suite: str) -> None:
        if suite not in self.commands:
            nearest = difflib.get_close_matches(suite, self.commands, 1)
            meant = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"{name} must be one of {', '.join(self.commands)}, got {suite!r}{meant}")

    def _check_flags(self, suite: str, arguments: Sequence[str]) -> None:
        """Raises ValueError for a flag of another suite, with the suite it belongs to, which the parser cannot name."""
        flags = {name: {flag for one in command.params for flag in one.opts} for name, command in self.commands.items()}
        for argument in arguments:
            flag = argument.partition("=")[0]
            owners = [name for name, known in flags.items() if flag in known]
            if flag.startswith("--") and owners and suite not in owners:
                raise ValueError(f"{flag} is a flag of outrider bench {', '.join(owners)}, not of {suite}")


@contextmanager
def checked() -> Iterator[None]:
    """Ends the command with one line if its arguments are wrong."""
    try:
        yield
    except (PromptError, ValueError, OSError) as error:
        message = in_flags(error) if isinstance(error, PlaintextRefused) else str(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(WRONG_USAGE)
