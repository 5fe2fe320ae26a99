"""How the `outrider` command fails: one line on stderr and an exit code, never a traceback for what a user can cause.

1 = it failed; 2 = wrong usage; 3 = the server cannot be reached or is not ready; 130 = interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_client.errors import InvalidArgument, OutriderError, ResourceExhausted, Unavailable

FAILED = 1
WRONG_USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130

_NOBODY_THERE = re.compile("connection refused|connection reset|no route to host|domain name not found|dns", re.I)


class FlagError(ValueError):
    """A flag has a wrong value. The message names the flag, the rule and the value."""

    def __init__(self, flag: str, rule: str, value: object) -> None:
        super().__init__(f"{flag} must be {rule}, got {str(value)!r}")


@contextmanager
def reported(address: str | None = None) -> Iterator[None]:
    """Ends the command as the table above says if the body fails. `address` is named if nobody answers there."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except OutriderError as error:
        _complain(_sentence(error, address))
        code = {Unavailable: UNREACHABLE, InvalidArgument: WRONG_USAGE}.get(type(error), FAILED)
        raise typer.Exit(code) from None
    except BrokenPipeError:
        raise  # the reader of our output has had enough: typer ends quietly
    except (ProcessFailed, RedisNotFound, RedisFailed, OSError) as error:
        _complain(str(error))
        raise typer.Exit(FAILED) from None
    except ValueError as error:  # a value that does not fit on the wire, like a negative seed
        _complain(str(error))
        raise typer.Exit(WRONG_USAGE) from None


def _sentence(error: OutriderError, address: str | None) -> str:
    if isinstance(error, Unavailable):
        if cause := _NOBODY_THERE.search(error.message):
            where = address or "the server"
            advice = "start one with `outrider up`, or name another with --address or OUTRIDER_ADDRESS"
            return f"cannot reach a verifier at {where} ({cause.group().lower()}): {advice}"
        return f"not available now: {error.message}"
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        return f"{error.message}; try again in {error.retry_after_s:g} s"
    return f"{error.message} ({error.code.name})"


def _complain(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
