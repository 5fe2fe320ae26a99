"""A verifier that does what a test tells it: for faults that a real one cannot be made to show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse

Script = Callable[[GenerateRequest, grpc.ServicerContext], Iterator[GenerateResponse]]

SEED = 2**63 + 1
METHODS = (types_pb2.METHOD_OFF, types_pb2.METHOD_SPECULATIVE, types_pb2.METHOD_PEARL, types_pb2.METHOD_RETRIEVAL)
"""Methods that it says it offers."""


def started(model_id: str = "", dtype: str = "") -> GenerateResponse:
    model = types_pb2.ModelInfo(model_id=model_id, dtype=dtype)
    return GenerateResponse(started=verifier_pb2.Started(session_id="s-1", seed=SEED, num_prompt_tokens=3, model=model))


def chunk(*token_ids: int, text: str = "", source: types_pb2.Source = types_pb2.SOURCE_DRAFT) -> GenerateResponse:
    """A round's tokens: all from one source but the last, which is the target's."""
    sources = [source] * (len(token_ids) - 1) + [types_pb2.SOURCE_TARGET]
    return GenerateResponse(chunk=verifier_pb2.Chunk(token_ids=token_ids, sources=sources, text=text, num_drafted=8))


def finished(num_output_tokens: int = 4) -> GenerateResponse:
    summary = verifier_pb2.SpeculationSummary(
        method=types_pb2.METHOD_PEARL,
        num_rounds=2,
        num_drafted_tokens=16,
        num_accepted_tokens=2,
        num_bytes_sent=40,
        num_bytes_received=100,
    )
    return GenerateResponse(
        finished=verifier_pb2.Finished(
            reason=verifier_pb2.FINISH_REASON_STOP,
            stop_token_id=0,
            num_output_tokens=num_output_tokens,
            summary=summary,
        )
    )


def a_good_generation(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
    yield started()
    yield chunk(5, 6, 7, text="a b c")
    yield chunk(8, text=" d")
    yield finished()


def saying(*pieces: str, is_cut: bool = False, stop_string: str | None = None) -> Script:
    """Says a text in these pieces, one token each. `is_cut`: it has reached its length. `stop_string`: ends it."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        for piece in pieces:
            yield chunk(5, text=piece)
        end = finished(len(pieces))
        if is_cut:
            end.finished.reason = verifier_pb2.FINISH_REASON_LENGTH
        if stop_string is not None:
            end.finished.ClearField("stop_token_id")
            end.finished.stop_string = stop_string
        yield end

    return script


def breaking_off(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
    """Fails after its first token, in a way that no other call mends."""
    yield started()
    yield chunk(5, text="a")
    context.abort(grpc.StatusCode.DATA_LOSS, "why")


class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Follows a script and remembers what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.health = health.HealthServicer()
        self.requests: list[GenerateRequest] = []
        self.ended = threading.Event()
        """Set when a call of Generate is over, for whatever reason."""
        self.script: Script = a_good_generation
        self.speculators: list[verifier_pb2.PeerInfo] = []
        """The speculators that it says it has."""
        self.model_id = ""
        """The model that it names; empty: "fake" when it is asked, and nothing when a generation starts."""
        self.chat_template = ""
        """The chat template that it says it has."""
        self.has_template = True
        """False if it refuses to tokenize chats."""
        self.tokens: set[str] | None = None
        """The tokens of callers that may ask what it is; None: everybody may."""
        self.num_asked = 0
        """How often it was asked what it is."""
        self.default_sampling = types_pb2.SamplingParams()
        """The sampling that it declares as its default for requests that set none."""
        self.forward_times: dict[int, float] = {}
        """Milliseconds of its forwards by their rows."""

    def Generate(self, request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.ended.set)
        for response in self.script(request, context):
            if self.model_id and response.HasField("started"):
                response.started.model.model_id = self.model_id
            yield response

    def Tokenize(
        self, request: verifier_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.TokenizeResponse:
        if request.prompt.HasField("chat") and not self.has_template:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is no chat template")
        text = request.prompt.text + "".join(message.content for message in request.prompt.chat.messages)
        return verifier_pb2.TokenizeResponse(token_ids=text.encode())

    def Detokenize(
        self, request: verifier_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.DetokenizeResponse:
        return verifier_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetInfo(
        self, request: verifier_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.GetInfoResponse:
        self.num_asked += 1
        given = dict(context.invocation_metadata()).get("authorization")
        if self.tokens is not None and given not in {f"Bearer {token}" for token in self.tokens}:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "this token is not in the server's list")
        model = types_pb2.ModelInfo(
            model_id=self.model_id or "fake",
            vocab_size=256,
            max_context_len=2048,
            default_sampling=self.default_sampling,
        )
        peer = verifier_pb2.PeerInfo(address="127.0.0.1:1", last_error="no answer")
        times = [verifier_pb2.ForwardTime(num_rows=rows, forward_ms=ms) for rows, ms in self.forward_times.items()]
        return verifier_pb2.GetInfoResponse(
            model=model,
            methods=METHODS,
            speculator=peer,
            version="1",
            speculators=self.speculators,
            forward_times=times,
            chat_template=self.chat_template,
        )


def until_cancelled(fake: FakeVerifier) -> Script:
    """Says one chunk, then nothing until the caller is gone."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        yield chunk(5, 6, text="a b")
        fake.ended.wait(30)

    return script


@contextmanager
def running_fake() -> Iterator[FakeVerifier]:
    """A fake verifier that listens on loopback and is healthy."""
    fake = FakeVerifier()  # type: ignore[abstract]  # other methods are UNIMPLEMENTED
    fake.health.set("", health_pb2.HealthCheckResponse.SERVING)
    with futures.ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        server.stop(None).wait()


@pytest.fixture
def verifier() -> Iterator[FakeVerifier]:
    """See `running_fake`."""
    with running_fake() as fake:
        yield fake
