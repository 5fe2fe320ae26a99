"""Flags for the results of a suite: a report on the terminal, JSON on stdout, or files in a folder."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from outrider_bench.suite import Suite
from outrider_cli.failures import FlagError
from outrider_cli.options import with_flags

RUN = "The run"
"""Group of the flags that every suite has."""
WIDTH = 118
"""Columns of a report that is not written to a terminal: tables wrap badly."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Output:
    """What the user wants of the results."""

    folder: Path | None = None
    """Folder for results.json and a report. None means that nothing is written."""
    as_json: bool = False
    """Prints what results.json keeps on stdout, and the report on stderr."""

    def check(self) -> None:
        """Raises FlagError: an hour of measuring should not end at a folder that cannot be written to."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FlagError("--out", f"a folder that can be written to ({error.strerror})", self.folder) from None
        if not os.access(self.folder, os.W_OK):
            raise FlagError("--out", "a folder that can be written to", self.folder)

    def of(self, suite: Suite) -> int:
        """Runs a suite, prints and writes its results, and returns the exit status."""
        console = Console(stderr=self.as_json)
        console = console if console.is_terminal else Console(stderr=self.as_json, width=WIDTH)
        status = suite.run(self.folder, console)
        if self.as_json:
            print(json.dumps(suite.results(), allow_nan=False), flush=True)
        return status


def with_output(command: Callable[..., _T]) -> Callable[..., _T]:
    """Adds the flags of the output to a command. Its argument `output` gets their values."""
    flags = list(inspect.signature(_output, eval_str=True).parameters.values())
    return with_flags(command, "output", flags, _output)


def _output(
    *,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and a report.", rich_help_panel=RUN)] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The results as a JSON object on stdout; all else on stderr.", rich_help_panel=RUN),
    ] = False,
) -> Output:
    return Output(out, as_json)
