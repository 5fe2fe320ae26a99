"""The blocking client of a verifier: `client.py` without asyncio, over a blocking channel.

It uses a blocking channel, not a private event loop in a thread: so it works next to any loop of the caller's, and
Ctrl-C reaches the thread that reads. `base.py` has what both clients share.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

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
from outrider_client.channel import ChannelSecurity, SecurityOptions, open_blocking
from outrider_client.chats import ChatOptions
from outrider_client.errors import Cancelled, OutriderError, from_rpc_error
from outrider_client.generation import Chunk, Result
from outrider_client.requests import GenerateOptions, Prompt, generate_request, prompt_message
from outrider_client.tracing import GenerationTrace

_T = TypeVar("_T")


class Stream(Protocol):
    """A `Stream` is a running call (the type stubs of gRPC do not name it)."""

    def __iter__(self) -> Iterator[verifier_pb2.GenerateResponse]: ...

    def cancel(self) -> object: ...


class BlockingGeneration(BaseGeneration["WatchedCall"]):
    """A `BlockingGeneration` is a running generation: an iterator of chunks. After its end, `result` is set.

    `close()`, leaving `with`, and dropping the last reference end it; merely leaving `for` does not, as long as the
    generation is still referred to.
    """

    def __init__(self, state: ResumableGeneration, trace: GenerationTrace, open_call: OpenCall[Stream]) -> None:
        self._cancelled = threading.Event()  # `_open`, which the base constructor calls, reads it
        # The lambda must not refer to `self`, as `BaseClient._generation` says.
        super().__init__(state, trace, lambda *call: WatchedCall(open_call(*call)))

    def cancel(self) -> None:
        """Ends the work on all servers within one round. A pending or later read raises Cancelled. Idempotent."""
        # The flag first: otherwise the thread that reads would take CANCELLED for a refusal, and resume.
        self._cancelled.set()
        self._cancel()

    def close(self) -> None:
        """Cancels the generation, unless it has finished."""
        if self._result is None:
            self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._early:
            return self._early.popleft()
        while (response := self._receive()) is not None:
            if (chunk := self._fold(response)) is not None:
                return chunk
        self._end()
        raise StopIteration

    def started(self) -> None:
        """Returns when a server has admitted the generation; `session_id` and `seed` are known from then on. Raises the
        error of a generation that is refused. Loses no chunk."""
        while self.session_id is None:
            if (response := self._receive()) is None:
                self._end()
                return
            if (chunk := self._fold(response)) is not None:
                self._early.append(chunk)

    def _receive(self) -> verifier_pb2.GenerateResponse | None:
        """Returns the next message of the generation, over all its calls; None at its end."""
        while True:
            try:
                response = self._read()
                # Within the `try`: a replica with another model is left like one that broke.
                if response is None or self._take_message(response):
                    return response
            except OutriderError as error:
                self._resume(error)

    def _open(self) -> WatchedCall:
        call = super()._open()
        if self._cancelled.is_set():  # by another thread, which has cancelled the call before this one
            call.cancel()
        return call

    def _resume(self, error: OutriderError) -> None:
        """Goes on in another call. Raises the error if it is final."""
        if self._cancelled.is_set():
            raise Cancelled(CANCELLED) from None
        # A wait, not a sleep: `cancel` of another thread ends the pause.
        if self._cancelled.wait(self._pause_s(error)):
            raise Cancelled(CANCELLED) from None
        # The client was closed in the pause: for a call on a closed channel gRPC raises a ValueError, not an RpcError.
        if self._state.is_closed:
            raise error
        self._call = self._open()

    def _read(self) -> verifier_pb2.GenerateResponse | None:
        """Returns the next message of the call; None at its end."""
        try:
            return self._call.read(self._state.await_message(time.monotonic()))
        except TimeoutError:
            raise self._stalled() from None
        except grpc.RpcError as error:
            if self._result is not None:
                return None  # all has come; only the status is missing
            raise from_rpc_error(error, self._state.address) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingClient(BaseClient[grpc.Channel]):
    """Connects to a verifier, or to the replicas of one. Thread-safe. Retries and raises errors as `Client` does.

    >>> with BlockingClient("127.0.0.1:50051") as client:                       # doctest: +SKIP
    ...     print(client.complete("def add(", temperature=0, max_tokens=32).text)
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
        super().__init__(address, metadata, secured, partial(open_blocking, retries=False))
        self._stubs = [VerifierServiceStub(channel) for channel in self._channels]

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> BlockingGeneration:
        """Starts a generation. Returns at once: errors of the server are raised by the first read."""
        return self.generation_of(generate_request(prompt, options), options)

    def generation_of(self, request: verifier_pb2.GenerateRequest, options: GenerateOptions) -> BlockingGeneration:
        """Starts a generation as `generate` does. `request`: made by `generate_request` from a prompt and these
        options."""
        return BlockingGeneration(*self._generation(request, options, [stub.Generate for stub in self._stubs]))

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Generates to the end."""
        with self.generate(prompt, **options) as generation:
            for _ in generation:
                pass
        return generation.result

    def tokenize(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Returns the token ids of a prompt, by the target's tokenizer (and chat template)."""
        request = verifier_pb2.TokenizeRequest(prompt=prompt_message(prompt, options))
        return list(self._ask([stub.Tokenize for stub in self._stubs], request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> str:
        """Returns the text of token ids, by the target's tokenizer. Bytes that form no character become U+FFFD."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids)
        return self._ask([stub.Detokenize for stub in self._stubs], request, timeout_s).text

    def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[bytes]:
        """Returns the bytes that each token stands for by itself; for a special token, those of its name."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids, wants_token_bytes=True)
        return list(self._ask([stub.Detokenize for stub in self._stubs], request, timeout_s).token_bytes)

    def info(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> verifier_pb2.GetInfoResponse:
        """Returns the server's description: model, methods, limits, peers, load."""
        return self._ask([stub.GetInfo for stub in self._stubs], verifier_pb2.GetInfoRequest(), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Returns False while the server, or each of several replicas, loads or drains. Raises Unavailable if none
        can be reached."""
        request = health_pb2.HealthCheckRequest(service=service)
        checks = [health.Check for health in self._health_stubs]
        if is_serving(self._ask(checks, request, timeout_s)):
            return True
        if len(checks) == 1:
            return False
        others = [check.future(request, timeout=timeout_s, metadata=self._metadata) for check in checks]
        return any(other.exception() is None and is_serving(other.result()) for other in others)

    def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        if self._is_view:
            return  # the connection is another client's
        # First, as the calls that the closing breaks must not be resumed.
        self._replicas.is_closed = True
        for channel in self._channels:
            channel.close()

    def _ask(self, calls: Sequence[Callable[..., _T]], request: object, timeout_s: float | None) -> _T:
        """Returns the answer of a replica. `calls` has the method of each replica."""
        attempts = self._attempts(timeout_s)
        while True:
            call = calls[attempts.begin(time.monotonic())]
            try:
                answer = call(request, timeout=attempts.remaining_s(time.monotonic()), metadata=self._metadata)
            except grpc.RpcError as error:
                # `pause_after` raises a final error, which ends the loop.
                time.sleep(pause_after(attempts, from_rpc_error(error, attempts.address)))
            else:
                attempts.on_answer(time.monotonic())
                return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class WatchedCall:
    """Reads a call that a thread cancels when a read takes too long. The call ends when this object is dropped."""

    def __init__(self, call: Stream) -> None:
        self._call = call
        self._responses = iter(call)
        self._watch: _Watch | None = None

    def read(self, timeout_s: float | None) -> verifier_pb2.GenerateResponse | None:
        """Returns the next message; None at the end.

        Raises grpc.RpcError; or TimeoutError, after which the call is over.
        """
        # A blocking read of gRPC has no timeout of its own: only cancelling the call from outside ends it.
        if timeout_s is None:
            return next(self._responses, None)
        if self._watch is None:
            self._watch = _Watch(self._call)
        watch = self._watch
        watch.begin(timeout_s)
        try:
            response = next(self._responses, None)
        except grpc.RpcError as error:
            # `end` takes the lock: after it the watch cannot fire any more, and `has_fired` says whether it has.
            watch.end()
            if watch.has_fired:
                raise TimeoutError from error
            raise
        if response is None:
            watch.end()
        watch.pause()
        return response

    def cancel(self) -> None:
        """Ends the call: a pending read raises grpc.RpcError."""
        self._call.cancel()

    def __del__(self) -> None:
        # The thread keeps the watch alive, but not this object, so a dropped generation gets here.
        if self._watch is not None:
            self._watch.end()


class _Watch:
    """Runs the thread that watches the reads of a call. It holds no strong reference to the call: dropping the call
    ends it."""

    def __init__(self, call: Stream) -> None:
        self.has_fired = False
        """True once it has cancelled the call."""
        self._call = weakref.ref(call)
        self._condition = threading.Condition()
        self._deadline = self._wakes_at = math.inf
        self._is_over = False
        threading.Thread(target=self._run, name="outrider-stall-watch", daemon=True).start()

    def begin(self, timeout_s: float) -> None:
        """Sets the deadline of a read that begins."""
        with self._condition:
            self._deadline = time.monotonic() + timeout_s
            # The thread notices a deadline later than the one that it sleeps towards when it wakes by itself.
            if self._deadline < self._wakes_at:
                self._condition.notify()

    def pause(self) -> None:
        """Lifts the deadline: the read is over."""
        with self._condition:
            self._deadline = math.inf

    def end(self) -> None:
        """Ends the thread: the call is over."""
        with self._condition:
            self._is_over = True
            self._condition.notify()

    def _run(self) -> None:
        with self._condition:
            while not self._is_over and not self.has_fired:
                # Most deadlines are moved before they pass: the thread wakes once per timeout, not once per message.
                self._wakes_at = self._deadline
                wait_s = self._wakes_at - time.monotonic()
                self.has_fired = wait_s <= 0
                if not self.has_fired:
                    self._condition.wait(None if math.isinf(wait_s) else wait_s)
        call = self._call()
        if self.has_fired and call is not None:
            call.cancel()
