"""A benchmark from beginning to end: workers, services, turns; and the results at any moment in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver
from outrider_bench.environment import describe_config, describe_environment
from outrider_bench.experiment import Contender, contenders_of
from outrider_bench.machine import DRAFT_ROWS, TARGET_ROWS, Machine
from outrider_bench.running import num_generations, run_turn, schedule, warm_up
from outrider_bench.samples import Block, Sample
from outrider_bench.servers import describe_server, running_stack
from outrider_bench.statistics import rows_of
from outrider_bench.suite import Say
from outrider_bench.workers.client import Worker
from outrider_client.channel import NO_SECURITY, ChannelSecurity

_MODULES = {"hf": "outrider_bench.workers.hf", "bare": "outrider_bench.workers.bare"}


class Benchmark:
    """Runs what the config asks for. What has been measured is kept however the run ends."""

    def __init__(self, config: BenchConfig, security: ChannelSecurity = NO_SECURITY) -> None:
        """`security`: of the channel to the verifier at `config.address`."""
        self.config = config
        self._security = security
        self.contenders: Sequence[Contender] = contenders_of(config)
        self._blocks: list[Block] = []
        self._models: dict[str, dict[str, Any]] = {}
        self._machine = Machine()
        self._is_complete = False

    @property
    def num_generations(self) -> int:
        """Generations to run, warm-up aside."""
        return num_generations(self.config, self.contenders)

    @property
    def has_samples(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._blocks)

    async def run(self, say: Say, on_sample: Callable[[Sample], None]) -> None:
        """Runs to the end. `say` hears what is going on before the first generation.

        Raises:
            GenerationFailed: A contender could not even warm up.
            WorkerError: A worker process could not be started, or died.
            StackError: The services could not be started.
        """
        async with AsyncExitStack() as stack:
            drivers = await self._start_workers(stack, say)
            for rtt_ms in self.config.rtts_ms:
                async with self._services(rtt_ms, say) as driver:
                    await self._run_turns(drivers | {"stack": driver}, rtt_ms, say, on_sample)
        self._is_complete = True

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config = self.config
        return {
            "environment": describe_environment(self._models, config.cores),
            "config": describe_config(config),
            "interrupted": not self._is_complete,
            "rows": rows_of(self._blocks, len(config.prompts), config.repeats),
            "machine": self._machine.to_json(),
        }

    async def _run_turns(
        self,
        drivers: dict[str, Driver],
        rtt_ms: float,
        say: Say,
        on_sample: Callable[[Sample], None],
    ) -> None:
        present = [contender for contender in self.contenders if contender.driver in drivers]
        say("warming up")
        await warm_up(self.config, present, drivers)
        for turn in schedule(self.config, self.contenders, rtt_ms):
            driver = drivers[turn.contender.driver]
            self._blocks.append(await run_turn(turn, self.config, driver, on_sample))

    async def _start_workers(self, stack: AsyncExitStack, say: Say) -> dict[str, Driver]:
        """Measures single forwards, and starts the baselines that were asked for."""
        if self.config.address is not None:
            return {}
        drivers: dict[str, Driver] = {}
        say("measuring single forwards")
        bare = await self._start_worker("bare")
        stack.push_async_callback(bare.stop)
        self._models = {role: bare.hello[role] for role in ("target", "draft")}
        # The middle of a generation, roughly: attention costs more the longer the text is.
        context = 128 + self.config.max_tokens // 2
        times = await bare.call("measure", target_rows=TARGET_ROWS, draft_rows=DRAFT_ROWS, context=context)
        self._machine = Machine(*({int(k): v for k, v in times[f"{role}_forward_ms"].items()} for role in self._models))
        if "bare" in self.config.baselines:
            drivers["bare"] = bare
        else:
            await bare.stop()
        if "hf" in self.config.baselines:
            say("loading the models into transformers")
            hf = await self._start_worker("hf")
            stack.push_async_callback(hf.stop)
            drivers["hf"] = hf
        return drivers

    async def _start_worker(self, name: str) -> Worker:
        config = self.config
        arguments = ["--target", config.target, "--draft", config.draft]
        arguments += ["--dtype", config.dtype, "--draft-dtype", config.draft_dtype]
        return await Worker.start(_MODULES[name], arguments, config.cores[0] if config.cores else None)

    @asynccontextmanager
    async def _services(self, rtt_ms: float, say: Say) -> AsyncIterator[Driver]:
        say("starting the services" if self.config.address is None else f"connecting to {self.config.address}")
        async with running_stack(self.config, rtt_ms, self._security) as (driver, info):
            if not self._models:
                self._models = describe_server(info)
                self._machine = Machine({time.num_rows: time.forward_ms for time in info.forward_times})
            yield driver
