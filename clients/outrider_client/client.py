"""The asyncio client of a verifier. `blocking.py` is the same without asyncio; `base.py` is what both share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2

from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider.wire.resumption import ResumableGeneration
from outrider_client.base import (
    CANCELLED,
    DEFAULT_TIMEOUT_S,
    BaseClient,
    BaseGeneration,
    Metadata,
    OpenCall,
    is_serving,
    pause_after,
)
from outrider_client.channel import ChannelSecurity, SecurityOptions, open_aio
from outrider_client.chats import ChatOptions
from outrider_client.errors import Cancelled, Internal, OutriderError, from_rpc_error
from outrider_client.generation import Chunk, Result
from outrider_client.requests import GenerateOptions, Prompt, generate_request, prompt_message
from outrider_client.tracing import GenerationTrace

_T = TypeVar("_T")
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[verifier_pb2.GenerateRequest, verifier_pb2.GenerateResponse]"


class Generation(BaseGeneration[_Call]):
    """A `Generation` is a running generation: an async iterator of chunks. After its end, `result` is set.

    The server works as long as the call lives. `aclose()`, leaving `async with`, cancelling the task that reads, and
    dropping the last reference all end it. Merely leaving `async for` does not, as long as the generation is still
    referred to.

    A call that breaks is resumed, on another replica if there is one: the chunks go on as if nothing had happened.

    >>> async with client.generate("def add(", max_tokens=32) as generation:    # doctest: +SKIP
    ...     async for chunk in generation:
    ...         print(chunk.text, end="")
    >>> generation.result.finish_reason                                         # doctest: +SKIP
    """

    def __init__(self, state: ResumableGeneration, trace: GenerationTrace, open_call: OpenCall[_Call]) -> None:
        super().__init__(state, trace, open_call)
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """Ends the work on all servers within one round. A pending or later read raises Cancelled. Idempotent."""
        self._cancelled.set()
        self._cancel()

    async def aclose(self) -> None:
        """Cancels the generation, unless it has finished."""
        if self._result is None:
            self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._early:
            return self._early.popleft()
        while (response := await self._receive()) is not None:
            if (chunk := self._fold(response)) is not None:
                return chunk
        self._end()
        raise StopAsyncIteration

    async def started(self) -> None:
        """Returns when a server has admitted the generation; `session_id` and `seed` are known from then on. Raises the
        error of a generation that is refused. Loses no chunk."""
        while self.session_id is None:
            if (response := await self._receive()) is None:
                self._end()
                return
            if (chunk := self._fold(response)) is not None:
                self._early.append(chunk)

    async def _receive(self) -> verifier_pb2.GenerateResponse | None:
        """Returns the next message of the generation, over all its calls; None at its end."""
        while True:
            try:
                response = await self._read()
                # Within the `try`: a replica with another model is left like one that broke.
                if response is None or self._take_message(response):
                    return response
            except OutriderError as error:
                await self._resume(error)

    async def _resume(self, error: OutriderError) -> None:
        """Goes on in another call. Raises the error if it is final."""
        if self._cancelled.is_set():
            raise Cancelled(CANCELLED) from None
        pause_s = self._pause_s(error)
        # The timeout is the ordinary end of the pause: only `cancel` ends the wait before it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), pause_s)
            raise Cancelled(CANCELLED) from None
        # The client was closed in the pause: for a call on a closed channel gRPC raises a UsageError, not an RpcError.
        if self._state.is_closed:
            raise error
        self._call = self._open()

    async def _read(self) -> verifier_pb2.GenerateResponse | None:
        """Returns the next message of the call; None at its end."""
        try:
            async with asyncio.timeout(self._state.await_message(time.monotonic())):
                response = await self._call.read()
        except grpc.RpcError as error:
            if self._result is not None:
                return None  # all has come; only the status is missing
            raise from_rpc_error(error, self._state.address) from error
        except TimeoutError:
            raise self._stalled() from None
        except asyncio.CancelledError:
            # grpc.aio also raises it in a read whose call was cancelled. If the task itself is to end, that comes
            # first: swallowing it would break timeouts and task groups around us.
            task = asyncio.current_task()
            if self._cancelled.is_set() and not (task is not None and task.cancelling()):
                raise Cancelled(CANCELLED) from None
            raise
        # grpc.aio logs what the deserializer raises, and hands out None as if it were a message.
        if response is None:
            self._call.cancel()
            raise Internal("a message of the server cannot be parsed")
        # Anything but a message is grpc.aio's EOF.
        return response if isinstance(response, verifier_pb2.GenerateResponse) else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class Client(BaseClient[grpc.aio.Channel]):
    """Connects to a verifier, or to the replicas of one. Make and use it inside one event loop; any number of
    generations may run at a time.

    A generation goes to the replica that has least to do, by what they report and what runs here. Equals take turns;
    one that has failed is left alone for a while. Calls that no replica takes (UNAVAILABLE before the first message)
    are repeated for about a second. A generation is repeated for `resume_timeout_s` if a replica has answered before,
    or says that it loads or drains. A generation that breaks later is resumed: see `GenerateOptions`. Every other
    failure raises an `OutriderError`.

    >>> async with Client("10.0.0.1:50051,10.0.0.2:50051") as client:           # doctest: +SKIP
    ...     result = await client.complete("def add(", temperature=0, max_tokens=32)
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        **security: Unpack[SecurityOptions],
    ) -> None:
        """`address`: HOST:PORT; several, with commas between them or as a sequence, are replicas of one verifier.
        Raises ValueError for plaintext to another machine, unless `insecure` is given."""
        secured = ChannelSecurity(credentials=credentials, **security)
        super().__init__(address, metadata, secured, partial(open_aio, retries=False))
        self._stubs = [VerifierServiceStub(channel) for channel in self._channels]

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Starts a generation. Returns at once: errors of the server are raised by the first read."""
        return self.generation_of(generate_request(prompt, options), options)

    def generation_of(self, request: verifier_pb2.GenerateRequest, options: GenerateOptions) -> Generation:
        """Starts a generation as `generate` does. `request`: made by `generate_request` from a prompt and these
        options. A large one may be made in a thread, so that others on the event loop do not wait."""
        return Generation(*self._generation(request, options, [stub.Generate for stub in self._stubs]))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Generates to the end. Cancelling the awaiting task cancels the generation."""
        async with self.generate(prompt, **options) as generation:
            async for _ in generation:
                pass
        return generation.result

    async def tokenize(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Returns the token ids of a prompt, by the target's tokenizer (and chat template)."""
        request = verifier_pb2.TokenizeRequest(prompt=prompt_message(prompt, options))
        response = await self._ask([stub.Tokenize for stub in self._stubs], request, timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> str:
        """Returns the text of token ids, by the target's tokenizer. Bytes that form no character become U+FFFD."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids)
        response = await self._ask([stub.Detokenize for stub in self._stubs], request, timeout_s)
        return response.text

    async def token_bytes(
        self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> list[bytes]:
        """Returns the bytes that each token stands for by itself; for a special token, those of its name."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids, wants_token_bytes=True)
        response = await self._ask([stub.Detokenize for stub in self._stubs], request, timeout_s)
        return list(response.token_bytes)

    async def info(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> verifier_pb2.GetInfoResponse:
        """Returns the server's description: model, methods, limits, peers, load."""
        return await self._ask([stub.GetInfo for stub in self._stubs], verifier_pb2.GetInfoRequest(), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Returns False while the server, or each of several replicas, loads or drains. Raises Unavailable if none
        can be reached."""
        request = health_pb2.HealthCheckRequest(service=service)
        checks = [health.Check for health in self._health_stubs]
        if is_serving(await self._ask(checks, request, timeout_s)):
            return True
        if len(checks) == 1:
            return False
        # The replica that has answered does not serve; another may. One that does not answer in time does not serve.
        others = [check(request, timeout=timeout_s, metadata=self._metadata) for check in checks]
        answers = await asyncio.gather(*others, return_exceptions=True)
        return any(is_serving(answer) for answer in answers if not isinstance(answer, BaseException))

    async def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        if self._is_view:
            return  # the connection is another client's
        # First, as the calls that the closing breaks must not be resumed.
        self._replicas.is_closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _ask(self, calls: Sequence[Callable[..., Awaitable[_T]]], request: object, timeout_s: float | None) -> _T:
        """Returns the answer of a replica. `calls` has the method of each replica."""
        attempts = self._attempts(timeout_s)
        while True:
            call = calls[attempts.begin(time.monotonic())]
            try:
                answer = await call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                # `pause_after` raises a final error, which ends the loop.
                await asyncio.sleep(pause_after(attempts, from_rpc_error(error, attempts.address)))
            else:
                attempts.on_answer(time.monotonic())
                return answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
