"""Failures of the `outrider` command: one line on stderr and an exit code, never a traceback for what a user can cause.

1: it failed; 2: wrong usage; 3: the server cannot be reached or is not ready; 130: interrupted.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_client.channel import PlaintextRefused
from outrider_client.errors import InvalidArgument, OutriderError, ResourceExhausted, Unauthenticated, Unavailable

FAILED = 1
WRONG_USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130

_FIELD = re.compile(
    r"\b(?:sampling|report|structured_outputs|speculation(?:\.retrieval_params)?)\.([a-z_]+)(?:\.([a-z_]+))?"
)
_FLAGS = {
    "stop_token_ids": "--stop-token-id",
    "bad_words": "--bad-word",
    "json": "--json-schema",
    "scope": "--retrieval-scope",
    "remote": "--retrieval-remote",
    "retrieval_params": "--retrieval-scope, --contribute, --sources or --retrieval-remote",
}
"""Flags that are not named like their options, or like their fields on the wire."""


class FlagError(ValueError):
    """A flag has a wrong value. The message names the flag, the rule and the value."""

    def __init__(self, flag: str, rule: str, value: object) -> None:
        super().__init__(f"{flag} must be {rule}, got {str(value)!r}")


@contextmanager
def reported() -> Iterator[None]:
    """Ends the command with one line and its exit code if the body fails."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted", kind="")
        raise typer.Exit(INTERRUPTED) from None
    except OutriderError as error:
        complain(_sentence(error))
        code = {Unavailable: UNREACHABLE, InvalidArgument: WRONG_USAGE}.get(type(error), FAILED)
        raise typer.Exit(code) from None
    except SystemExit as error:
        if (number := error.code) in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            complain(f"ended by {signal.Signals(int(number) - 128).name}", kind="")
        raise
    except BrokenPipeError:  # before OSError, of which it is one
        raise  # the reader of our output has closed it, as `head` does: typer ends quietly
    except (ProcessFailed, RedisNotFound, RedisFailed, OSError) as error:
        complain(str(error))
        raise typer.Exit(FAILED) from None
    except PlaintextRefused as error:
        complain(in_flags(error))
        raise typer.Exit(WRONG_USAGE) from None
    except ValueError as error:  # a value that does not fit on the wire, like a negative seed
        complain(str(error))
        raise typer.Exit(WRONG_USAGE) from None


def in_plain_words(rule: str) -> str:
    """Returns the rule of a value without the words of the library that has checked it."""
    return rule.removeprefix("Value error, ").replace("Input should be ", "must be ", 1)


def in_flags(error: PlaintextRefused) -> str:
    """Returns the refusal in the words of a command, whose flags the SDK does not know."""
    return f"{error.address} is not on this machine: --ca-file is needed for TLS, or --insecure to go without"


def _sentence(error: OutriderError) -> str:
    """Returns an error of a server as a sentence, with advice where there is any."""
    message = with_flags_for_fields(error.message)
    if isinstance(error, Unavailable):
        if error.is_unreachable:
            return f"{message}: start one with `outrider up`, or name another with --address or OUTRIDER_ADDRESS"
        return f"not available now: {message}"
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        return f"{message}; try again in {error.retry_after_s:g} s"
    if isinstance(error, Unauthenticated):
        return f"{message} (--token-file or OUTRIDER_TOKEN_FILE names the file with it)"
    return f"{message} ({error.code.name})"


def with_flags_for_fields(message: str) -> str:
    """Returns a message of a server with the flags of a generation in place of the fields that they set.

    >>> with_flags_for_fields("sampling.top_p must be in (0, 1], got 2")
    '--top-p must be in (0, 1], got 2'
    """
    return _FIELD.sub(_flag, message)


def flag_of(name: str) -> str:
    """Returns the flag of an option of a generation, or of its field on the wire."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _flag(found: re.Match[str]) -> str:
    name, of_method = found.groups()
    return f"--method-param {of_method}" if of_method else flag_of(name)


def complain(message: str, *, kind: str = "error: ") -> None:
    """Prints a line to stderr."""
    # Messages quote what users typed, brackets included, which rich would take for markup; and one line stays one.
    Console(stderr=True).print(f"{kind}{message}", markup=False, highlight=False, soft_wrap=True)
