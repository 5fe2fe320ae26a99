"""How a contender generates: over gRPC against the services, or in a worker process for a baseline.

Both take the time where the tokens arrive, on the clock of the process that asked for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grpc import aio

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_bench.samples import TIME_NAMES, Chunk, GenerationSample, Request, Rounds
from outrider_client.requests import method_name


class Driver(Protocol):
    """Runs one generation at a time, or many at once."""

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """Generates to the end. Raises GenerationFailed."""


class GenerationFailed(RuntimeError):
    """A generation did not come to its end. The message says why, in one line."""


class StackDriver:
    """Generates over gRPC, the way an application does."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceAsyncStub) -> None:
        self._stub = stub

    async def generate(
        self, request: Request, options: Mapping[str, Any], metadata: Sequence[tuple[str, str]] = ()
    ) -> GenerationSample:
        """See Driver. `metadata`: of the call."""
        message = to_proto(request, options)
        token_ids: list[int] = []
        chunks: list[Chunk] = []
        num_prompt_tokens, num_judged, rounds = 0, 0, None
        started = time.perf_counter()
        try:
            async for response in self._stub.Generate(message, metadata=tuple(metadata)):
                match response.WhichOneof("event"):
                    case "started":
                        num_prompt_tokens = response.started.num_prompt_tokens
                    case "chunk":
                        chunks.append(Chunk(time.perf_counter() - started, len(response.chunk.token_ids)))
                        token_ids.extend(response.chunk.token_ids)
                        num_judged += num_judged_in(response.chunk)
                    case "finished":
                        rounds = replace(rounds_from_proto(response.finished.summary), num_judged=num_judged)
        except aio.AioRpcError as error:
            raise GenerationFailed(f"{error.code().name}: {error.details()}") from None
        duration_s = time.perf_counter() - started
        if rounds is None or not token_ids:
            raise GenerationFailed("the stream ended without tokens or without `finished`")
        return GenerationSample(num_prompt_tokens, tuple(token_ids), tuple(chunks), duration_s, rounds)


def to_proto(request: Request, options: Mapping[str, Any]) -> verifier_pb2.GenerateRequest:
    """The request that a contender sends. It ignores end-of-sequence tokens, so that all outputs are equally long."""
    fields = dict(options)
    method = wire_name(fields.pop("method"))
    return verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text=request.prompt),
        sampling=types_pb2.SamplingParams(
            temperature=request.temperature, seed=request.seed, max_tokens=request.max_tokens, ignore_eos=True
        ),
        speculation=types_pb2.SpeculationParams(method=method, **fields),
    )


def wire_name(method: str) -> str:
    """The name of a method on the wire: METHOD_BEST_FIRST for "best-first"."""
    return f"METHOD_{method.upper().replace('-', '_')}"


def num_judged_in(chunk: verifier_pb2.Chunk) -> int:
    """Chain tokens of a round that were compared with the target's: those behind a refused one never are.

    A chunk ends with the target's own token, save one that a stop token cuts short.
    """
    kept = sum(source != types_pb2.SOURCE_TARGET for source in chunk.sources)
    return min(kept + (kept < len(chunk.sources)), chunk.num_drafted)


def rounds_from_proto(summary: verifier_pb2.SpeculationSummary) -> Rounds:
    """What the server says about its rounds."""
    return Rounds(
        num_rounds=summary.num_rounds,
        num_drafted=summary.num_drafted_tokens,
        num_accepted=summary.num_accepted_tokens,
        num_empty=summary.num_empty_rounds,
        num_hits=summary.num_hits,
        accepted_by_source={
            types_pb2.Source.Name(count.source).removeprefix("SOURCE_").lower(): count.num_tokens
            for count in summary.accepted_by_source
        },
        decisions=_decisions(summary),
        degraded=summary.degraded,
        times_p50={name: float(getattr(summary.times_p50, name)) for name in TIME_NAMES},
    )


def _decisions(summary: verifier_pb2.SpeculationSummary) -> dict[str, int]:
    """Rounds by what METHOD_AUTO chose for them."""
    found: Counter[str] = Counter()
    for decision in summary.decisions:
        words = [method_name(decision.method)]
        words += ["tree"] if decision.rows == types_pb2.ROWS_TREE else []
        words += ["+ retrieval"] if decision.retrieval else []
        found[" ".join(words)] += decision.num_rounds
    return dict(found)
