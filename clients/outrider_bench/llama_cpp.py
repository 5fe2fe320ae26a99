"""llama.cpp's server as a driver: its worker process, with a server for each setting that takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver
from outrider_bench.experiment import LLAMA_CPP_CONTENDERS
from outrider_bench.workers.client import Worker

_MODULE = "outrider_bench.workers.llama_cpp"


@asynccontextmanager
async def running_llama_cpp(config: BenchConfig) -> AsyncIterator[Driver]:
    """Runs `config.llama_server` with the pair of `config` while the block runs, once for each setting.

    Each server may use all cores of `config`, as our target and draft model together do. The worker that calls them is
    not pinned: it stays with this process, on the core of everything else.

    Raises:
        WorkerError: The models cannot be written as GGUF files.
        GenerationFailed: The program is no llama-server, or does not start.
    """
    worker = await Worker.start_pair(_MODULE, config, None)
    try:
        settings = [dict(contender.options) for contender in LLAMA_CPP_CONTENDERS]
        await worker.call("start", program=config.llama_server, cores=sorted(set(config.cores)), settings=settings)
        yield worker
    finally:
        await worker.stop()
