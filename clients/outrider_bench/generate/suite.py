"""The suite of `generate`: workers, services, turns, under a progress bar."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import (
    Driver,
    GenerationFailed,
    StackError,
    check_prompts,
    describe_server,
    merge_models,
    running_stack,
)
from outrider_bench.environment import DRAFT_ROWS, TARGET_ROWS, Machine, describe_config, describe_environment
from outrider_bench.experiment import LLAMA_CPP, Contender, contenders_of
from outrider_bench.generate.report import report_of
from outrider_bench.llama_cpp import running_llama_cpp
from outrider_bench.running import num_generations, run_turn, schedule, warm_up
from outrider_bench.samples import Block, Sample
from outrider_bench.statistics import rows_of
from outrider_bench.suite import Log, Suite
from outrider_bench.workers.client import Worker, WorkerError
from outrider_cli.failures import FAILED, UNREACHABLE, WRONG_USAGE
from outrider_cli.prompts import PromptError
from outrider_client.channel import NO_SECURITY, ChannelSecurity

_MODULES = {"hf": "outrider_bench.workers.hf", "bare": "outrider_bench.workers.bare"}


class GenerateSuite(Suite):
    """Measures contenders in turns, in everything that the configuration varies."""

    name = "generate"
    report_of = staticmethod(report_of)

    def __init__(self, config: BenchConfig, security: ChannelSecurity = NO_SECURITY) -> None:
        """`security` is that of the channel to the verifier at `config.address`."""
        super().__init__(config.cores)
        self.config = config
        self.contenders: Sequence[Contender] = contenders_of(config)
        self._security = security
        self._blocks: list[Block] = []
        self._models: dict[str, dict[str, Any]] = {}
        self._machine = Machine()
        self._console = Console(stderr=True)

    @property
    def has_failures(self) -> bool:
        return False

    def run(self, out: Path | None, console: Console) -> int:
        """See Suite. A contender, worker or service that fails ends the run; the report is followed by the reason."""
        self._console = console
        try:
            return super().run(out, console)
        except (GenerationFailed, PromptError, WorkerError, StackError) as error:
            print(f"error: {error}", file=sys.stderr)
            if isinstance(error, PromptError):
                return WRONG_USAGE
            return UNREACHABLE if isinstance(error, StackError) and self.config.address else FAILED

    async def measure(self, log: Log) -> None:
        """Runs to the end, with a progress bar instead of the log.

        Raises:
            GenerationFailed: A contender could not even warm up.
            WorkerError: A worker process could not be started, or died.
            StackError: The services could not be started.
            PromptError: A prompt is a chat, and the target has no template for chats.
        """
        with self._progress() as (show, on_sample):
            async with AsyncExitStack() as stack:
                drivers = await self._start_workers(stack, show)
                for rtt_ms in self.config.rtts_ms:
                    async with self._services(rtt_ms, show) as driver:
                        await self._run_turns(drivers | {"stack": driver}, rtt_ms, show, on_sample)

    def found(self) -> dict[str, Any]:
        config = self.config
        return {
            "environment": describe_environment(self._models, config.cores),
            "config": describe_config(config),
            "rows": rows_of(self._blocks, len(config.prompts), config.repeats),
            "machine": self._machine.to_json(),
        }

    def _leave(self, out: Path | None, console: Console) -> None:
        # Without a sample every table would be empty.
        if self._blocks:
            super()._leave(out, console)

    @contextmanager
    def _progress(self) -> Iterator[tuple[Log, Callable[[Sample], None]]]:
        """Shows a progress bar while the block runs; anything but a terminal gets a few lines instead."""
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        console, num_done = self._console, 0
        total = num_generations(self.config, self.contenders)
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
            task = progress.add_task("", total=total)

            def print_line(text: str) -> None:
                if not console.is_terminal:  # a log has no progress bar
                    console.print(text, markup=False, highlight=False)

            def show(text: str) -> None:
                progress.update(task, description=text)
                print_line(text)

            def on_sample(sample: Sample) -> None:
                nonlocal num_done
                num_done += 1
                made = sample.generation
                speed = f"{len(made.token_ids) / made.duration_s:.0f} tok/s" if made else f"failed: {sample.error}"
                text = f"{sample.condition.label}, temperature {sample.condition.temperature:g}: {speed}"
                progress.update(task, completed=num_done, description=text)
                # Ten lines in all, whatever the number of generations.
                if num_done * 10 // total > (num_done - 1) * 10 // total:
                    print_line(f"{num_done} of {total} generations")

            yield show, on_sample

    async def _run_turns(
        self, drivers: dict[str, Driver], rtt_ms: float, log: Log, on_sample: Callable[[Sample], None]
    ) -> None:
        present = [contender for contender in self.contenders if contender.driver in drivers]
        log("warming up")
        await warm_up(self.config, present, drivers)
        for turn in schedule(self.config, self.contenders, rtt_ms):
            driver = drivers[turn.contender.driver]
            self._blocks.append(await run_turn(turn, self.config, driver, on_sample))

    async def _start_workers(self, stack: AsyncExitStack, log: Log) -> dict[str, Driver]:
        """Measures single forwards, and starts the chosen baselines."""
        if self.config.address is not None:
            return {}
        drivers: dict[str, Driver] = {}
        log("loading the models")
        bare = await self._start_worker("bare")
        stack.push_async_callback(bare.stop)
        check_prompts(self.config, has_chat_template=bare.hello["has_chat_template"])
        self._models = {role: bare.hello[role] for role in ("target", "draft")}
        log("measuring single forwards")
        # Roughly the middle of a generation: attention costs more the longer the text is.
        context = 128 + self.config.max_tokens // 2
        times = await bare.call("measure", target_rows=TARGET_ROWS, draft_rows=DRAFT_ROWS, context=context)
        self._machine = Machine(*({int(k): v for k, v in times[f"{role}_forward_ms"].items()} for role in self._models))
        # Otherwise it is no longer needed, and would hold the memory of two models.
        if "bare" in self.config.baselines:
            drivers["bare"] = bare
        else:
            await bare.stop()
        if "hf" in self.config.baselines:
            log("loading the models into transformers")
            hf = await self._start_worker("hf")
            stack.push_async_callback(hf.stop)
            drivers["hf"] = hf
        if self.config.llama_server:
            log("writing the models for llama.cpp")
            drivers[LLAMA_CPP] = await stack.enter_async_context(running_llama_cpp(self.config))
        return drivers

    async def _start_worker(self, name: str) -> Worker:
        cores = self.config.cores
        return await Worker.start_pair(_MODULES[name], self.config, cores[0] if cores else None)

    @asynccontextmanager
    async def _services(self, rtt_ms: float, log: Log) -> AsyncIterator[Driver]:
        log("starting the services" if self.config.address is None else f"connecting to {self.config.address}")
        async with running_stack(self.config, rtt_ms, self._security) as (driver, info):
            if not self._models:
                self._machine = Machine({time.num_rows: time.forward_ms for time in info.forward_times})
            self._models = merge_models(describe_server(info), self._models)
            yield driver
