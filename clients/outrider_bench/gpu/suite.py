"""The GPU suite: a pair is made on the spot, then every cell is measured, within the budget."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import GpuConfig
from outrider_bench.drivers import Driver, running_services
from outrider_bench.environment import describe_environment
from outrider_bench.gpu.cells import PEERS, Cell, Kept, cells_of, room_in, tokens_of
from outrider_bench.gpu.generations import options_of, requests_of, run_cell, value_of
from outrider_bench.gpu.report import report_of
from outrider_bench.samples import Request
from outrider_bench.suite import Log, Suite
from outrider_bench.workers.client import Worker
from outrider_cli.failures import WRONG_USAGE
from outrider_cli.local.stack import StackConfig
from outrider_cli.prompts import load_prompts

WORKER = "outrider_bench.workers.gpu"
SHARES = {"services": 0.5, "peers": 0.8, "micro": 0.95}
"""Share of the budget after which no cell of a part begins, and another program that still compiles is given up."""
ANCHOR_EVERY_S = 60.0
MICRO_ROWS = {"8b": (1, 16, 32, 64, 128, 256, 512), "tiny": (1, 16)}


class DeviceRefused(Exception):
    """The device does not exist. The message gives the reason in one line."""


class GpuSuite(Suite):
    """Measures one GPU."""

    name = "gpu"
    report_of = staticmethod(report_of)

    def __init__(self, config: GpuConfig) -> None:
        super().__init__()
        self.config = config
        self._began = 0.0
        self._kept = Kept(None, {})
        self._left_out: list[str] = []
        self._hello: dict[str, Any] = {}
        self._folders: dict[str, str] = {}
        self._prompts: dict[int, list[str]] = {}
        self._dtype = ""
        self._num_tokens = 0
        """Tokens whose keys and values each of the two pools holds."""
        self._longest_s = dict.fromkeys(SHARES, 0.0)
        """Time of the longest cell of each part so far."""
        self._anchored_at = 0.0

    def run(self, out: Path | None, console: Console) -> int:
        """See Suite. A missing device is wrong usage, reported in one line."""
        try:
            status = super().run(out, console)
            if "models" in self.failures:  # then no report says it
                print(f"error: the models could not be made: {self.failures['models']}", file=sys.stderr)
            return status
        except DeviceRefused as error:
            print(f"error: {error}; --device cpu --size tiny shows without one that all of it works", file=sys.stderr)
            return WRONG_USAGE

    async def measure(self, log: Log) -> None:
        """Measures every part.

        Raises:
            DeviceRefused: There is no such device.
        """
        self._began = time.perf_counter()
        await self.attempt("models", partial(self._make_models, log))
        if "models" in self.failures:
            return
        config = self.config
        self._kept = Kept(config.cells, self._identity())
        runs = {"services": self._run_services, "peers": self._run_peers, "micro": self._run_micro}
        for part in config.parts:
            cells = [cell for cell in cells_of(config) if cell.part == part and not self._kept.find(cell)]
            if cells:
                await self.attempt(part, partial(runs[part], cells, log))

    async def _make_models(self, log: Log) -> None:
        config = self.config
        async with self._worker() as worker:
            log(f"{self._hello['device']}; making the models in {config.models}, where they are not there already")
            made = await worker.call("make", size=config.size, weights=config.weights, folder=str(config.models))
            self._folders, self._dtype = made["folders"], made["dtype"]
            wanted = max(tokens_of(cell, config) for cell in cells_of(config))
            memory_gib = self._hello["memory_gib"]
            room = wanted if memory_gib is None else room_in(memory_gib, made["weights_bytes"], made["bytes_per_token"])
            self._num_tokens = min(wanted, room)
            texts = [prompt.text for prompt in load_prompts("demo")]
            asked = {"lengths": config.contexts, "count": max(*config.sessions, 4)}
            found = await worker.call("prompts", folder=self._folders["target"], texts=texts, **asked)
            self._prompts = {int(length): prompts for length, prompts in found["prompts"].items()}

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Worker]:
        """Runs a worker on the device while the block runs. Raises DeviceRefused."""
        worker = await Worker.start(WORKER, ["--device", self.config.device], None)
        try:
            self._hello = worker.hello
            if "refusal" in worker.hello:
                raise DeviceRefused(worker.hello["refusal"])
            yield worker
        finally:
            await worker.stop()

    async def _run_services(self, cells: list[Cell], log: Log) -> None:
        log("starting the services")
        async with running_services(self._stack_config()) as services:
            self._kept.keep_exact_off_reason(services.info.exact_off_reason)
            for method in dict.fromkeys(cell.label for cell in cells):
                request = Request(self._prompts[cells[0].context][0], 0.7, self.config.seed, 16)
                await services.driver.generate(request, options_of(method))
            for cell in cells:
                # Sessions that wait for each other's room would measure the wait.
                if tokens_of(cell, self.config) > self._num_tokens:
                    self._left_out.append(f"{cell.key} (no room in the memory)")
                    continue
                await self._anchor(services.driver)
                await self._run_cell(cell, services.driver, options_of(cell.label), log)
            await self._anchor(services.driver, is_last=True)

    def _stack_config(self) -> StackConfig:
        config = self.config
        # Sized here: if two processes each took the memory that they find free, the second one would get none.
        pool = ("--kv-cache-tokens", str(self._num_tokens))
        # Every prompt is read again: repeats would find it in the pool.
        flags: tuple[str, ...] = (*pool, "--prefix-scope", "off")
        if config.drafter == "in-process":
            drafter = ("--drafter", "in-process", "--draft-model", self._folders["draft"])
            flags += (*drafter, "--draft-dtype", self._dtype, "--draft-kv-cache-tokens", pool[1])
        return StackConfig(
            target=self._folders["target"],
            target_dtype=self._dtype,
            draft=self._folders["draft"] if config.drafter == "speculator" else None,
            draft_dtype=self._dtype,
            datastore=False,
            device=config.device,
            cores=(),
            verifier_arguments=flags,
            speculator_arguments=pool,
        )

    async def _run_peers(self, cells: list[Cell], log: Log) -> None:
        # A prompt may have a few more tokens than it was made of. A plain loop reads all places at each step.
        longest = self.config.contexts[0] + self.config.max_tokens + 64
        async with self._worker() as worker:
            log("loading the models for other programs")
            await worker.call("open", **self._folders, max_len=longest)
            warm: set[str] = set()
            for number, cell in enumerate(cells):
                if self._is_over(cell):
                    continue
                if cell.label not in warm:
                    warm.add(cell.label)
                    if not await self._warm_up(worker, cell):
                        # The worker is still busy with it, and answers nothing else.
                        self._left_out += [each.key for each in cells[number:]]
                        return
                if cell.label not in self.failures:
                    await self._run_cell(cell, worker, PEERS[cell.label], log)

    async def _warm_up(self, worker: Worker, cell: Cell) -> bool:
        """Runs the first text of a way, which pays for compilation and capture. Returns False if that takes longer than
        the budget allows."""
        request = requests_of(cell, self._prompts[cell.context], self.config)[0]
        left_s = self._budget_s * SHARES[cell.part] - (time.perf_counter() - self._began)
        try:
            async with asyncio.timeout(left_s):
                await self.attempt(cell.label, partial(worker.generate, request, PEERS[cell.label]))
        except TimeoutError:
            return False
        return True

    async def _run_micro(self, cells: list[Cell], log: Log) -> None:
        config = self.config
        sizes: dict[str, Any] = {"rows": MICRO_ROWS[config.size], "sessions": sorted(config.sessions)}
        for cell in cells:
            if self._is_over(cell):
                continue
            log(f"single parts: {cell.label}, context {cell.context}")
            asked = {"context": cell.context, "num_repeats": 15 if config.size == "8b" else 3}
            asked["is_draft"] = cell.label == "draft"
            await self._attempt_cell(cell, partial(self._measure_parts, cell, sizes | asked))

    async def _measure_parts(self, cell: Cell, asked: dict[str, Any]) -> None:
        async with self._worker() as worker:
            found = await worker.call("measure", model=self._folders[cell.label], dtype=self._dtype, **asked)
        self._kept.keep(cell, found)

    async def _run_cell(self, cell: Cell, driver: Driver, options: dict[str, Any], log: Log) -> None:
        if self._is_over(cell):
            return
        log(f"{cell.label}, {cell.sessions} at once, T = {cell.temperature:g}, context {cell.context}")
        requests = requests_of(cell, self._prompts[cell.context], self.config)

        async def measure() -> None:
            samples = await run_cell(cell, requests, driver, options)
            self._kept.keep(cell, value_of(cell, samples, self._alone(cell, samples)))

        await self._attempt_cell(cell, measure)

    async def _attempt_cell(self, cell: Cell, measure: Callable[[], Awaitable[None]]) -> None:
        began = time.perf_counter()
        await self.attempt(cell.key, measure)
        self._longest_s[cell.part] = max(self._longest_s[cell.part], time.perf_counter() - began)

    def _alone(self, cell: Cell, samples: list[Any]) -> list[list[int]] | None:
        """Returns the tokens that `off` alone has said to the same prompts; None if it has not been run."""
        if cell.is_alone and cell.repeat == 0:
            return [list(sample.token_ids) for sample in samples]
        for known, value in self._kept.values.items():
            if known.is_alone and (known.temperature, known.context) == (cell.temperature, cell.context):
                texts: list[list[int]] = value["token_ids"]
                return texts
        return None

    async def _anchor(self, driver: Driver, *, is_last: bool = False) -> None:
        """Measures `off` alone once more every minute, which shows if the machine slows down."""
        now = time.perf_counter()
        if self._kept.anchors and not is_last and now - self._anchored_at < ANCHOR_EVERY_S:
            return
        self._anchored_at = now
        cell = Cell("services", "off", context=self.config.contexts[0])
        requests = requests_of(cell, self._prompts[cell.context], self.config)[:1]
        samples = await run_cell(cell, requests, driver, options_of("off"))
        rate = value_of(cell, samples, None)["tokens_per_s"]
        self._kept.keep_anchor({"at_s": now - self._began, "tokens_per_s": rate})

    @property
    def _budget_s(self) -> float:
        return 60 * self.config.minutes

    def _is_over(self, cell: Cell) -> bool:
        """Returns True if the budget of the cell's part is used up, or if the run's would be by a cell as long as the
        longest one before it. Notes that the cell is left out."""
        budget_s, past_s = self._budget_s, time.perf_counter() - self._began
        is_over = past_s > budget_s * SHARES[cell.part] or past_s + self._longest_s[cell.part] > budget_s
        if is_over:
            self._left_out.append(cell.key)
        return is_over

    def _identity(self) -> dict[str, Any]:
        config = self.config
        versions = describe_environment({}, ())["versions"]
        return {
            "device": self._hello["device"],
            "versions": versions,
            **{name: getattr(config, name) for name in ("size", "weights", "drafter", "max_tokens", "seed")},
        }

    def found(self) -> dict[str, Any]:
        config = self.config
        return {
            "environment": describe_environment({}, ()),
            "device": self._hello.get("device", config.device),
            "memory_gib": self._hello.get("memory_gib"),
            "dtype": self._dtype,
            "exact_off_reason": self._kept.exact_off_reason,
            "config": {
                name: getattr(config, name)
                for name in ("size", "weights", "drafter", "max_tokens", "repeats", "minutes", "seed")
            },
            "cells": [
                {
                    **{name: getattr(cell, name) for name in ("part", "label", "temperature", "sessions", "context")},
                    "repeat": cell.repeat,
                    "value": {name: one for name, one in value.items() if name != "token_ids"},
                }
                for cell, value in self._kept.values.items()
            ],
            "anchors": self._kept.anchors,
            "left_out": self._left_out,
        }

    def _leave(self, out: Path | None, console: Console) -> None:
        # Without a device every table would be empty, and the error has the reason.
        if self._folders:
            super()._leave(out, console)
