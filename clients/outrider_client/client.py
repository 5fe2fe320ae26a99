"""The asyncio client of a verifier. `blocking.py` is the same without asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_client.channel import open_aio
from outrider_client.channel_security import ChannelSecurity, SecurityOptions
from outrider_client.errors import Cancelled, from_rpc_error
from outrider_client.generation import Chunk, Result, Transcript
from outrider_client.requests import GenerateOptions, Prompt, generate_request, prompt_message

_T = TypeVar("_T")
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[verifier_pb2.GenerateRequest, verifier_pb2.GenerateResponse]"

Metadata = Sequence[tuple[str, str | bytes]]

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of everything but `generate`."""


class Generation(Transcript):
    """A running generation: an async iterator of chunks. After its end, `result` is set.

    The server works as long as the call lives. `aclose()`, leaving `async with`, cancelling the task that reads, and
    dropping the last reference all end it; merely leaving `async for` does not, as long as the
    generation is still referred to.

    >>> async with client.generate("def add(", max_tokens=32) as generation:    # doctest: +SKIP
    ...     async for chunk in generation:
    ...         print(chunk.text, end="")
    >>> generation.result.finish_reason                                         # doctest: +SKIP
    """

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call
        self._cancelled_here = False

    def cancel(self) -> None:
        """Ends the work on all servers within one round. A pending or later read raises Cancelled. Idempotent."""
        self._cancelled_here = True
        self._call.cancel()

    async def aclose(self) -> None:
        """As `cancel`; nothing happens to a generation that has finished."""
        if self._result is None:
            self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while (response := await self._read()) is not None:
            if (chunk := self._fold(response)) is not None:
                return chunk
        self._end()
        raise StopAsyncIteration

    async def _read(self) -> verifier_pb2.GenerateResponse | None:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled_here and not (task is not None and task.cancelling()):
                raise Cancelled("the generation was cancelled by its caller") from None
            raise
        return response if isinstance(response, verifier_pb2.GenerateResponse) else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class Client:
    """A connection to a verifier. Make and use it inside one event loop; any number of generations may run at a time.

    Calls that fail with UNAVAILABLE before the first message are repeated, at most three times within about a second.
    Every other failure raises an `OutriderError`.

    >>> async with Client("127.0.0.1:50051") as client:                         # doctest: +SKIP
    ...     result = await client.complete("def add(", temperature=0, max_tokens=32)
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        **security: Unpack[SecurityOptions],
    ) -> None:
        """Raises ValueError for plaintext to another machine, unless `insecure` is given."""
        secured = ChannelSecurity(credentials=credentials, **security)
        self.address = address
        self._metadata = (*metadata, *secured.metadata)
        self._channel = open_aio(address, secured.credentials_for(address))
        self._stub = VerifierServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Starts a generation. Returns at once: errors of the server are raised by the first read."""
        request = generate_request(prompt, options)
        return Generation(self._stub.Generate(request, timeout=options.get("timeout_s"), metadata=self._metadata))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Generates to the end. Cancelling the awaiting task cancels the generation."""
        async with self.generate(prompt, **options) as generation:
            async for _ in generation:
                pass
        return generation.result

    async def tokenize(self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[int]:
        """Token ids of a prompt, by the target's tokenizer (and chat template)."""
        request = verifier_pb2.TokenizeRequest(prompt=prompt_message(prompt))
        response = await self._ask(self._stub.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> str:
        """Text of token ids, by the target's tokenizer. Bytes that form no character become U+FFFD."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids)
        response = await self._ask(self._stub.Detokenize, request, timeout_s)
        return response.text

    async def info(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> verifier_pb2.GetInfoResponse:
        """What the server is: model, methods, limits, peers, load."""
        return await self._ask(self._stub.GetInfo, verifier_pb2.GetInfoRequest(), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Whether the server serves; False while it loads or drains. Raises Unavailable if it cannot be reached."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._ask(self._health.Check, request, timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        await self._channel.close()

    async def _ask(self, call: Callable[..., Awaitable[_T]], request: object, timeout_s: float | None) -> _T:
        try:
            return await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
