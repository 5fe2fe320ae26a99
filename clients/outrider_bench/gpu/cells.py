"""Cells are single measurements, repeated once per repeat; a folder keeps their results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider_bench.config import GpuConfig

PEERS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, assisted": {"assistant": {}},
    "plain loop": {"graph": True},
    "transformers, static cache": {"cache_implementation": "static"},
}
"""Options of the worker, by the name of each other program's way to decode. With a static cache, transformers compiles
the model if the device is a GPU, which takes so long that it comes last; there, the plain loop is a CUDA graph."""
ROOM = 256
"""Tokens of a session besides prompt and output: drafts, and a partly filled block."""
POOLS_SHARE = 0.8
"""Share of the memory besides the weights that the pools may take: the rest is for graphs and activations."""


RUN = "run"
"""Name of the file with what belongs to no cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Names one measurement."""

    part: str
    """A name of GPU_PARTS."""
    label: str
    """A method; another program; or the role of the model whose single parts are measured."""
    temperature: float = 0.0
    sessions: int = 1
    context: int = 0
    repeat: int = 0

    @property
    def key(self) -> str:
        """Returns a name that no other cell has, for a file."""
        words = self.label.replace(", ", "-").replace(" ", "-")
        return f"{self.part}-{words}-t{self.temperature:g}-s{self.sessions}-c{self.context}-r{self.repeat}"

    @property
    def is_alone(self) -> bool:
        """Returns True for `off` with one generation at a time, whose texts all others must reproduce."""
        return self.part == "services" and self.label == "off" and self.sessions == 1


def cells_of(config: GpuConfig) -> list[Cell]:
    """Returns all cells of a run in order: repeats outermost, the most important cells first.

    A machine that slows down affects all cells of a repeat; and if the budget ends, only the last repeat is incomplete.
    """
    return [cell for part in config.parts for cell in _cells_of_part(part, config)]


def _cells_of_part(part: str, config: GpuConfig) -> Iterator[Cell]:
    if part == "micro":
        for context in config.contexts:
            yield from (Cell(part, role, context=context) for role in ("target", "draft"))
        return
    if part == "peers":
        for repeat, name in itertools.product(range(config.repeats), PEERS):
            yield Cell(part, name, context=config.contexts[0], repeat=repeat)
        return
    # `off` alone always takes part, because texts are compared with it.
    methods = ("off", *(method for method in config.methods if method != "off"))
    for repeat, context in itertools.product(range(config.repeats), config.contexts):
        for sessions, temperature, method in itertools.product(
            (1, *(count for count in config.sessions if count != 1)), config.temperatures, methods
        ):
            cell = Cell(part, method, temperature, sessions, context, repeat)
            is_asked_for = method in config.methods and sessions in config.sessions
            if is_asked_for or (cell.is_alone and repeat == 0):
                yield cell


def tokens_of(cell: Cell, config: GpuConfig) -> int:
    """Returns the number of tokens whose keys and values a pool must hold for a cell; a multiple of 64."""
    return cell.sessions * -(-(cell.context + config.max_tokens + ROOM) // 64) * 64


def room_in(memory_gib: float, weights_bytes: int, bytes_per_token: int) -> int:
    """Returns the number of tokens whose keys and values the pools of a pair can hold; a multiple of 64.

    Args:
        memory_gib: Memory of the device, in GiB.
        weights_bytes: Bytes of the weights of both models.
        bytes_per_token: Bytes of a token in both pools together.
    """
    return max(0, int(POOLS_SHARE * (memory_gib * 2**30 - weights_bytes) / bytes_per_token) // 64 * 64)


class Kept:
    """Keeps results in a file for each cell, and finds those of an earlier run."""

    def __init__(self, folder: Path | None, identity: Mapping[str, Any]) -> None:
        """
        Args:
            folder: The folder of the files; None means none.
            identity: Everything that a result depends on, machine and versions included. Files with another one
                are ignored.
        """
        self._folder, self._identity = folder, dict(identity)
        self.values: dict[Cell, dict[str, Any]] = {}
        """Results by cell, in the order in which they were measured or found."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        found = self._read(RUN) or {"value": {"anchors": [], "exact_off_reason": ""}}
        self._run: dict[str, Any] = found["value"]

    def find(self, cell: Cell) -> bool:
        """Reads a cell's file; returns False if there is none of this identity."""
        found = self._read(cell.key)
        if found is not None:
            self.values[cell] = found["value"]
        return found is not None

    def keep(self, cell: Cell, value: dict[str, Any]) -> None:
        """Keeps the result of a cell at once, so that nothing is lost when the run ends."""
        self.values[cell] = value
        self._write(cell.key, value, asdict(cell))

    @property
    def anchors(self) -> list[dict[str, Any]]:
        """Rates of `off` alone during the runs."""
        anchors: list[dict[str, Any]] = self._run["anchors"]
        return anchors

    def keep_anchor(self, value: dict[str, Any]) -> None:
        """Adds a rate of `off` alone."""
        self.anchors.append(value)
        self._write(RUN, self._run, {})

    @property
    def exact_off_reason(self) -> str:
        """The reason why texts may differ between methods; empty means that they are exact."""
        return str(self._run["exact_off_reason"])

    def keep_exact_off_reason(self, reason: str) -> None:
        """Keeps the services' reason, because a run that continues may start no services."""
        self._run["exact_off_reason"] = reason
        self._write(RUN, self._run, {})

    def _read(self, key: str) -> dict[str, Any] | None:
        path = None if self._folder is None else self._folder / f"{key}.json"
        if path is None or not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None  # incomplete, because a run was killed
        return found if found.get("identity") == self._identity else None

    def _write(self, key: str, value: dict[str, Any], cell: dict[str, Any]) -> None:
        if self._folder is not None:
            text = json.dumps({"cell": cell, "identity": self._identity, "value": value}, indent=1, allow_nan=False)
            (self._folder / f"{key}.json").write_text(text + "\n", encoding="utf-8")
