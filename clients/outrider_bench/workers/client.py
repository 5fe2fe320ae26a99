"""Baselines in worker processes: one JSON object a line, requests on stdin, answers on stdout.

A separate process gives a baseline what the verifier has: a core, one thread, and no other work in between. It also
keeps torch out of the process that measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.samples import GenerationSample, Request, generation_from_json

_MAX_LINE = 1 << 24
_QUIT_TIMEOUT_S = 10.0


class WorkerError(RuntimeError):
    """A worker process could not be started, or died. The message holds the last line that it logged."""


class Worker:
    """A worker process. Answers one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self._turn = asyncio.Lock()
        self._is_reading = False
        """True while it reads its stdin, which means that it neither loads nor works on an answer."""
        self.hello: dict[str, Any] = {}
        """The worker's description of itself, sent once it was ready."""

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str], core: int | None) -> Worker:
        """Starts `python -m module`, and waits until it is ready."""
        # A pipe that is not read while an answer is awaited would fill up and block the worker; a file never does.
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        pinned = [] if core is None else ["--core", str(core)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments, *pinned),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=_MAX_LINE,  # asyncio refuses lines above 64 KiB by default; lists of latencies are longer
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            # Ctrl-C goes to the whole foreground group; the worker should end when it is told to, not in the middle of
            # a line.
            start_new_session=True,
        )
        worker = cls(process, log)
        try:
            worker.hello = await worker._read()
            worker._is_reading = True
        except BaseException:
            await worker.stop()
            raise
        return worker

    @classmethod
    async def start_pair(cls, module: str, config: BenchConfig, core: int | None) -> Worker:
        """Starts a worker that holds the pair of models; see `serve_pair`, and `start`."""
        arguments = ["--target", config.target, "--draft", config.draft]
        arguments += ["--dtype", config.dtype, "--draft-dtype", config.draft_dtype]
        return await cls.start(module, arguments, core)

    async def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request, and returns its answer. Raises GenerationFailed if the worker reports a failure."""
        assert self._process.stdin is not None
        async with self._turn:
            self._is_reading = False
            self._process.stdin.write(json.dumps({"operation": operation, **arguments}).encode() + b"\n")
            answer = await self._read()
            self._is_reading = True
        if "error" in answer:
            raise GenerationFailed(answer["error"])
        return answer

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """See Driver."""
        return generation_from_json(await self.call("generate", request=asdict(request), options=dict(options)))

    async def stop(self) -> None:
        """Ends the process: first it asks, then it kills."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _QUIT_TIMEOUT_S if self._is_reading else 0.1)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._log.close()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise WorkerError(f"a worker process ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"
