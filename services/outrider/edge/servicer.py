"""The RPCs that applications call: those of the cloud's verifier, as if it were local."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider.core.methods import METHODS
from outrider.edge.choices import texts_of, with_seed
from outrider.edge.draft_model import DraftModel
from outrider.edge.relay import Relay, Write
from outrider.edge.upstream import Upstreams, cause_of
from outrider.peers.channel import read_peers
from outrider.server import streams
from outrider.server.choices import run_choices
from outrider.speculator.metrics import read_drafts
from outrider.telemetry.generation_metrics import GenerationCalls, read_calls
from outrider.telemetry.metrics import Metrics, counter, gauge
from outrider.telemetry.tracing import GENERATE, traced_call
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire.errors import NotServing, Unimplemented, rpc_errors
from outrider.wire.speculation import METHODS_TO_PROTO

Context = grpc.aio.ServicerContext[Any, Any]


class EdgeServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves from the start. While the draft model is not ready, generations go up without drafts."""

    def __init__(
        self, upstreams: Upstreams, draft_model: DraftModel, resume_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self._upstreams, self._draft_model = upstreams, draft_model
        self._resume_timeout_s, self._stall_timeout_s = resume_timeout_s, stall_timeout_s
        self._is_draining = False
        self.num_sessions = 0
        self.calls = GenerationCalls()
        self.num_degraded = 0
        """Completed generations that lacked a drafter for some time."""

    def drain(self) -> None:
        """Refuses new calls from now on."""
        self._is_draining = True

    def metrics(self) -> Metrics:
        """Yields what was counted since the start. May be called in any thread."""
        yield from read_calls(self.calls, "outrider_edge_")
        yield counter(
            "outrider_edge_degraded_sessions_total",
            "Generations that came to their end and for part of which drafts, or a peer of the verifier, were missing.",
            self.num_degraded,
        )
        yield from read_peers(self._upstreams.states)
        # Read once: the event loop sets it when the model is loaded, possibly between two lines of this thread.
        drafter = self._draft_model.drafter
        yield gauge("outrider_edge_draft_model_ready", "Whether the draft model is loaded.", drafter is not None)
        if drafter is not None:
            yield from read_drafts(drafter.counts, drafter.num_sessions, drafter.pool_state())

    def _check_serving(self) -> None:
        if self._is_draining:
            raise NotServing("the edge is draining")

    async def Generate(self, request: verifier_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Runs one generation, or several of one prompt: the cloud decides, this edge drafts."""
        # In this order: the trace and the counts read the status, which `_passed_on` makes of an error.
        with traced_call(GENERATE, context), self.calls.call(context) as call, self._passed_on(context):
            self._check_serving()
            self.num_sessions += 1
            call.admit()

            async def send(response: verifier_pb2.GenerateResponse, index: int) -> None:
                response.index = index
                match response.WhichOneof("event"):
                    case "chunk":
                        call.chunk(len(response.chunk.token_ids))
                    case "finished":
                        call.finish(response.finished.reason)
                        self.num_degraded += response.finished.summary.degraded
                await streams.write(context, response, self._stall_timeout_s, "client")

            try:
                await self._generate(with_seed(request), context.time_remaining(), send)
            finally:
                self.num_sessions -= 1

    @contextmanager
    def _passed_on(self, context: Context) -> Iterator[None]:
        """Turns what the body raises into the status of the call. A status of the cloud is passed on as it is."""
        with rpc_errors(context):
            try:
                yield
            except grpc.aio.AioRpcError as error:
                # A cancellation by the cloud, or on the way, is not one by the application.
                is_cancelled = error.code() is grpc.StatusCode.CANCELLED
                context.set_code(grpc.StatusCode.UNAVAILABLE if is_cancelled else error.code())
                # Without an answer the message is gRPC's own, and sounds as if this edge were not there.
                cause = cause_of(error)
                away = f"the upstream {self._upstreams.names} is not reachable ({cause})"
                context.set_details(away if cause else error.details() or "")
                # The trailers have the details of the status, such as RetryInfo, in grpc-status-details-bin.
                context.set_trailing_metadata(tuple(error.trailing_metadata()))

    async def _generate(
        self,
        request: verifier_pb2.GenerateRequest,
        timeout_s: float | None,
        send: Callable[[verifier_pb2.GenerateResponse, int], Awaitable[None]],
    ) -> None:
        """Runs the texts of a request, each by calls of its own."""
        relays: dict[int, Relay] = {}

        async def run(index: int, elder: int | None, write: Write) -> None:
            relay = relays[index] = Relay(
                request, self._upstreams, self._draft_model, timeout_s, self._resume_timeout_s, index=index
            )
            if elder not in (None, index):
                relay.follow(relays[elder])
            await relay.run(write)

        await run_choices(texts_of(request), run, send, _is_of_text)

    async def Collaborate(  # type: ignore[override]
        self, requests: AsyncIterator[verifier_pb2.CollaborateRequest], context: Context
    ) -> None:
        """Refuses the call, which is for the cloud: this edge has a drafter of its own."""
        with self._passed_on(context):
            raise Unimplemented("Collaborate: an edge drafts itself; call Generate here, or Collaborate in the cloud")

    async def Tokenize(self, request: verifier_pb2.TokenizeRequest, context: Context) -> verifier_pb2.TokenizeResponse:
        """Has the cloud turn text into token ids."""
        with self._passed_on(context):
            self._check_serving()
            return await self._upstreams.ask(lambda stub: stub.Tokenize(request, timeout=context.time_remaining()))
        # Reached after an error, whose status is set by then: gRPC discards this response. Likewise below.
        return verifier_pb2.TokenizeResponse()

    async def Detokenize(
        self, request: verifier_pb2.DetokenizeRequest, context: Context
    ) -> verifier_pb2.DetokenizeResponse:
        """Has the cloud turn token ids into text."""
        with self._passed_on(context):
            self._check_serving()
            return await self._upstreams.ask(lambda stub: stub.Detokenize(request, timeout=context.time_remaining()))
        return verifier_pb2.DetokenizeResponse()

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Context) -> verifier_pb2.GetInfoResponse:
        """Describes the cloud, with this edge's draft model as its speculator."""
        with self._passed_on(context):
            self._check_serving()
            info = await self._upstreams.ask(lambda stub: stub.GetInfo(request, timeout=context.time_remaining()))
            info.speculator.CopyFrom(self._draft_model.peer_info(info.model))
            del info.speculators[:]  # the cloud's own, of which a generation here uses none
            served = {method for method, value in METHODS_TO_PROTO.items() if value in info.methods}
            # This edge also drafts for a cloud without a speculator, which could not offer these methods itself.
            methods = [method for method in METHODS.values() if method in served or method.has_draft_model]
            info.methods[:] = [METHODS_TO_PROTO[method] for method in methods]
            return info
        return verifier_pb2.GetInfoResponse()


def _is_of_text(response: verifier_pb2.GenerateResponse) -> bool:
    """Returns True for an event that comes only after the prompt was read."""
    return response.WhichOneof("event") in ("chunk", "finished")
