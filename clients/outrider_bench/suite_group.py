"""The group of all suites: finds the one that a command line names, and says what is wrong in one line."""

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

DEFAULT_SUITE = "generation"


class SuiteGroup(CommandGroup):
    """Finds the subcommand: `generation` if none is named, and that of `--suite`, as older releases had it."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """See CommandGroup; what is wrong about a suite or a flag is one line."""
        with checked():
            arguments = self._with_suite(list(arguments))
            if arguments and not arguments[0].startswith("-"):
                self._check_flags(arguments[0], arguments[1:])
            arguments = _with_flag_before_each("--goodput", arguments)
        return list(super().parse_args(context, arguments))

    def _with_suite(self, arguments: list[str]) -> list[str]:
        """Return the arguments with the subcommand in front. Raises ValueError for an unknown one."""
        for index, argument in enumerate(arguments):
            flag, has_value, suite = argument.partition("=")
            if flag == "--suite":
                end = index + 1 if has_value else index + 2
                suite = suite if has_value else "".join(arguments[index + 1 : end])
                self._check_suite("--suite", suite)
                rest = arguments[:index] + arguments[end:]
                typed = " ".join(["outrider bench", suite, *rest])
                print(f"--suite goes away with the next release; type: {typed}", file=sys.stderr)
                return [suite, *rest]
        # Only in front: behind a flag, --help is that of the suite which is run by default.
        if any(argument == "--help" for argument in arguments[:1]):
            return arguments
        if not arguments or arguments[0].startswith("-"):
            return [DEFAULT_SUITE, *arguments]
        self._check_suite("the suite", arguments[0])
        return arguments

    def _check_suite(self, name: str, suite: str) -> None:
        if suite not in self.commands:
            nearest = difflib.get_close_matches(suite, self.commands, 1)
            meant = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"{name} must be one of {', '.join(self.commands)}, got {suite!r}{meant}")

    def _check_flags(self, suite: str, arguments: Sequence[str]) -> None:
        """Raises ValueError for a flag of another suite: it says where the flag belongs, as the parser cannot."""
        flags = {name: {flag for one in command.params for flag in one.opts} for name, command in self.commands.items()}
        for argument in arguments:
            flag = argument.partition("=")[0]
            owners = [name for name, known in flags.items() if flag in known]
            if flag.startswith("--") and owners and suite not in owners:
                raise ValueError(f"{flag} is a flag of outrider bench {', '.join(owners)}, not of {suite}")


@contextmanager
def checked() -> Iterator[None]:
    """Ends the command with one line if what it was given is wrong."""
    try:
        yield
    except (PromptError, ValueError, OSError) as error:
        message = in_flags(error) if isinstance(error, PlaintextRefused) else str(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(WRONG_USAGE)


def _with_flag_before_each(flag: str, arguments: Sequence[str]) -> list[str]:
    """Put a flag before each of the words behind it: the parser takes one word a flag, `vllm bench serve` several."""
    found: list[str] = []
    is_behind = False
    for argument in arguments:
        if argument.startswith("-"):
            is_behind = argument.partition("=")[0] == flag
        elif is_behind and found[-1] != flag:
            found.append(flag)
        found.append(argument)
    return found
