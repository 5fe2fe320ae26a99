"""The drivers that contenders generate with: over gRPC against the services, or in a worker process for a baseline.

Both take the time when tokens arrive, on the clock of the process that asked for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from grpc import aio

from outrider.security.tokens import CallsWithMetadata
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_bench.config import BenchConfig, PairConfig
from outrider_bench.samples import TIME_NAMES, Chunk, GenerationSample, Request, Rounds
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.prompts import TEXT_SETS, PromptError
from outrider_client.channel import NO_SECURITY, ChannelSecurity, open_aio
from outrider_client.enums import method_name
from outrider_client.requests import prompt_message


class Driver(Protocol):
    """Runs one generation at a time, or many at once."""

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """Generates to the end. Raises GenerationFailed."""


class GenerationFailed(RuntimeError):
    """A generation failed. The message gives the reason in one line."""


class StackDriver:
    """Generates over gRPC, the way an application does."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceAsyncStub) -> None:
        self._stub = stub

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """See Driver."""
        message = to_proto(request, options)
        token_ids: list[int] = []
        chunks: list[Chunk] = []
        num_prompt_tokens, num_judged, rounds = 0, 0, None
        started = time.perf_counter()
        try:
            async for response in self._stub.Generate(message):
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
    """Makes a contender's request. It ignores end-of-sequence tokens, so that all outputs are equally long."""
    fields = dict(options)
    method = wire_name(fields.pop("method"))
    return verifier_pb2.GenerateRequest(
        prompt=prompt_message(request.prompt, {}),
        sampling=types_pb2.SamplingParams(
            temperature=request.temperature, seed=request.seed, max_tokens=request.max_tokens, ignore_eos=True
        ),
        speculation=types_pb2.SpeculationParams(method=method, **fields),
    )


def wire_name(method: str) -> str:
    """Returns the name of a method on the wire: METHOD_BEST_FIRST for "best-first"."""
    return f"METHOD_{method.upper().replace('-', '_')}"


def num_judged_in(chunk: verifier_pb2.Chunk) -> int:
    """Counts the chain tokens of a round that were compared with the target's; those after a refused one never are.

    A chunk ends with the target's own token, unless a stop token cuts it short.
    """
    kept = sum(source != types_pb2.SOURCE_TARGET for source in chunk.sources)
    # The kept ones, and the one that the target's own token replaced. After a chain that was kept whole there is none;
    # `min` accounts for that.
    return min(kept + (kept < len(chunk.sources)), chunk.num_drafted)


def rounds_from_proto(summary: verifier_pb2.SpeculationSummary) -> Rounds:
    """Reads what the server reports about its rounds."""
    return Rounds(
        num_rounds=summary.num_rounds,
        num_drafted=summary.num_drafted_tokens,
        num_accepted=summary.num_accepted_tokens,
        num_empty=summary.num_empty_rounds,
        num_hits=summary.num_hits,
        num_ready_hits=summary.num_ready_hits,
        num_draft_forwards=summary.num_draft_forwards,
        num_draft_rows=summary.num_draft_rows,
        num_withheld_nodes=summary.num_withheld_nodes,
        num_tail_tokens=summary.num_tail_tokens,
        num_phrase_tokens=summary.num_phrase_tokens,
        accepted_by_source={
            types_pb2.Source.Name(count.source).removeprefix("SOURCE_").lower(): count.num_tokens
            for count in summary.accepted_by_source
        },
        decisions=_decisions(summary),
        degraded=summary.degraded,
        times_p50={name: float(getattr(summary.times_p50, name)) for name in TIME_NAMES},
    )


def _decisions(summary: verifier_pb2.SpeculationSummary) -> dict[str, int]:
    """Rounds by METHOD_AUTO's choice for them."""
    found: Counter[str] = Counter()
    for decision in summary.decisions:
        words = [method_name(decision.method)]
        words += ["tree"] if decision.rows == types_pb2.ROWS_TREE else []
        words += ["+ retrieval"] if decision.retrieval else []
        found[" ".join(words)] += decision.num_rounds
    return dict(found)


_ANSWER_TIMEOUT_S = 10.0


class StackError(RuntimeError):
    """The services could not be started, or do not answer."""


@dataclass(frozen=True, slots=True)
class Services:
    """Services of our own, running."""

    stack: LocalStack
    driver: StackDriver
    info: verifier_pb2.GetInfoResponse
    """The verifier's answer to GetInfo."""


@asynccontextmanager
async def running_stack(
    config: BenchConfig, rtt_ms: float, security: ChannelSecurity = NO_SECURITY
) -> AsyncIterator[tuple[StackDriver, verifier_pb2.GetInfoResponse]]:
    """Runs the services, or connects to them, while the block runs.

    Yields:
        A driver, and the verifier's answer to GetInfo.

    Raises:
        StackError: The services do not start, or do not offer a method that is to be measured.
        PromptError: A prompt is a chat, and the target has no template for chats.
    """
    if config.address is None:
        async with running_services(stack_config(config, rtt_ms)) as services:
            _check_methods(config, services.info)
            check_prompts(config, has_chat_template=bool(services.info.chat_template))
            yield services.driver, services.info
    else:
        async with connected(config.address, security) as (driver, info):
            _check_methods(config, info)
            check_prompts(config, has_chat_template=bool(info.chat_template))
            yield driver, info


@asynccontextmanager
async def running_services(config: StackConfig) -> AsyncIterator[Services]:
    """Runs services of our own while the block runs. Raises StackError."""
    try:
        # Blocks the event loop on purpose: the processes live as long as the thread that starts them, and nothing else
        # runs yet.
        with LocalStack(config) as stack:
            async with connected(stack.address) as (driver, info):
                yield Services(stack, driver, info)
    except (ProcessFailed, RedisFailed, RedisNotFound) as error:
        raise StackError(str(error)) from None


@asynccontextmanager
async def connected(
    address: str, security: ChannelSecurity = NO_SECURITY
) -> AsyncIterator[tuple[StackDriver, verifier_pb2.GetInfoResponse]]:
    """Returns a driver for a running verifier, and its answer to GetInfo. Raises StackError if it does not answer."""
    async with open_aio(address, security.credentials_for(address)) as channel:
        # Not an interceptor, which would put a queue into the very streams whose arrivals are timed.
        stub = verifier_pb2_grpc.VerifierServiceStub(cast(aio.Channel, CallsWithMetadata(channel, security.metadata)))
        info = await _info(stub, address)
        yield StackDriver(stub), info


def stack_config(config: BenchConfig, rtt_ms: float) -> StackConfig:
    """Chooses what to start, with one thread per model, as the baselines have."""
    return StackConfig(
        target=config.target,
        target_dtype=config.dtype,
        draft=config.draft,
        draft_dtype=config.draft_dtype,
        # Without a round trip there is no proxy either: even one without delay would cost each message a hop.
        link=LinkSettings(delay_ms=rtt_ms / 2) if rtt_ms else None,
        num_threads=1,
        cores=config.cores,
    )


def describe_server(info: verifier_pb2.GetInfoResponse) -> dict[str, dict[str, Any]]:
    """Describes the target model as its server does, for results about a server whose weights are not at hand."""
    target = {
        "model_id": info.model.model_id,
        "dtype": info.model.dtype,
        "server_version": info.version,
        "exact_off_reason": info.exact_off_reason,
    }
    return {"target": target}


def merge_models(served: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merges a server's description of its models into that of a worker, which has their weights."""
    return {role: served.get(role, {}) | known.get(role, {}) for role in {**known, **served}}


async def _info(stub: verifier_pb2_grpc.VerifierServiceAsyncStub, address: str) -> verifier_pb2.GetInfoResponse:
    try:
        # `wait_for_ready`: a server that is still starting is no error before the timeout.
        return await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=_ANSWER_TIMEOUT_S, wait_for_ready=True)
    except aio.AioRpcError as error:
        raise StackError(f"the verifier at {address} does not answer: {error.code().name}: {error.details()}") from None


def check_prompts(config: BenchConfig | PairConfig, *, has_chat_template: bool) -> None:
    """Raises PromptError for chats that the target has no template for."""
    if not has_chat_template and any(prompt.messages for prompt in config.prompts):
        target = "the target" if config.address is not None else config.target
        texts = f"{' and '.join(TEXT_SETS)} are texts, which it can continue"
        raise PromptError(f"--prompts: {config.prompt_set} has chats, and {target} has no chat template; {texts}")


def _check_methods(config: BenchConfig, info: verifier_pb2.GetInfoResponse) -> None:
    """Checks that all methods are offered, in terms of the flag; the server would refuse only in the warm-up."""
    offered = {types_pb2.Method.Name(number) for number in info.methods}
    for method in config.methods:
        # The part after the + is no method, but the field `retrieval`.
        if wire_name(method.partition("+")[0]) not in offered:
            known = ", ".join(sorted(map(method_name, info.methods)))
            raise StackError(f"--methods: the verifier does not offer {method!r} (it offers {known})")
