"""The blocking client of a verifier: `client.py` without asyncio, over a blocking channel.

A blocking channel instead of a private event loop in a thread: it works beside any loop of the caller's, and Ctrl-C
reaches the thread that reads. What both clients share is in `requests`, `generation` and `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_client.channel import open_blocking
from outrider_client.channel_security import ChannelSecurity, SecurityOptions
from outrider_client.client import DEFAULT_TIMEOUT_S, Metadata
from outrider_client.errors import from_rpc_error
from outrider_client.generation import Chunk, Result, Transcript
from outrider_client.requests import GenerateOptions, Prompt, generate_request, prompt_message

_T = TypeVar("_T")


class _Stream(Protocol):
    """A running call (the type stubs of gRPC do not name it)."""

    def __iter__(self) -> Iterator[verifier_pb2.GenerateResponse]: ...

    def cancel(self) -> object: ...


class BlockingGeneration(Transcript):
    """A running generation: an iterator of chunks. After its end, `result` is set.

    `close()`, leaving `with`, and dropping the last reference end it; merely leaving `for` does not, as long as the
    generation is still referred to.
    """

    def __init__(self, call: _Stream) -> None:
        super().__init__()
        self._call = call

    def cancel(self) -> None:
        """Ends the work on all servers within one round. A pending or later read raises Cancelled. Idempotent."""
        self._call.cancel()

    def close(self) -> None:
        """As `cancel`; nothing happens to a generation that has finished."""
        if self._result is None:
            self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            for response in self._call:
                if (chunk := self._fold(response)) is not None:
                    return chunk
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        self._end()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class BlockingClient:
    """A connection to a verifier, thread-safe. Retries and errors as `Client`.

    >>> with BlockingClient("127.0.0.1:50051") as client:                       # doctest: +SKIP
    ...     print(client.complete("def add(", temperature=0, max_tokens=32).text)
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
        self._channel = open_blocking(address, secured.credentials_for(address))
        self._stub = VerifierServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> BlockingGeneration:
        """Starts a generation. Returns at once: errors of the server are raised by the first read."""
        request = generate_request(prompt, options)
        return BlockingGeneration(
            self._stub.Generate(request, timeout=options.get("timeout_s"), metadata=self._metadata)
        )

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Result:
        """Generates to the end."""
        with self.generate(prompt, **options) as generation:
            for _ in generation:
                pass
        return generation.result

    def tokenize(self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[int]:
        """Token ids of a prompt, by the target's tokenizer (and chat template)."""
        request = verifier_pb2.TokenizeRequest(prompt=prompt_message(prompt))
        return list(self._ask(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> str:
        """Text of token ids, by the target's tokenizer. Bytes that form no character become U+FFFD."""
        request = verifier_pb2.DetokenizeRequest(token_ids=token_ids)
        return self._ask(self._stub.Detokenize, request, timeout_s).text

    def info(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> verifier_pb2.GetInfoResponse:
        """What the server is: model, methods, limits, peers, load."""
        return self._ask(self._stub.GetInfo, verifier_pb2.GetInfoRequest(), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> bool:
        """Whether the server serves; False while it loads or drains. Raises Unavailable if it cannot be reached."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._ask(self._health.Check, request, timeout_s)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        self._channel.close()

    def _ask(self, call: Callable[..., _T], request: object, timeout_s: float | None) -> _T:
        try:
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
