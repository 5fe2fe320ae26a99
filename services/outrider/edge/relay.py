"""Relays one text from the cloud to an application, in as many calls as necessary.

Text and errors are the cloud's. The edge adds the draft tree, and a generation that has begun outlives its verifier: it
goes on with the same seed and with the tokens so far, which is exact.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from outrider.core.statistics import Absence, Peer
from outrider.edge.choices import request_of
from outrider.edge.collaboration import Collaboration
from outrider.edge.draft_model import DraftModel
from outrider.edge.upstream import Failure, Upstream, Upstreams, code_of, details_of, text_of
from outrider.peers.reconnecting import is_overwritten
from outrider.telemetry.tracing import COLLABORATE, GENERATE, Metadata, current_span
from outrider.v1 import verifier_pb2
from outrider.wire.channels import require_message
from outrider.wire.convert import missing_peer
from outrider.wire.errors import RpcError, Unavailable
from outrider.wire.resumption import Lost, Phase, ResumableGeneration, Taken
from outrider.wire.speculation import METHODS_FROM_PROTO

if TYPE_CHECKING:  # it imports torch, see there
    from outrider.speculator.drafter import Drafter

log = structlog.get_logger(__name__)

Write = Callable[[verifier_pb2.GenerateResponse], Awaitable[None]]

MAX_SILENCE_S = 25.0
"""Time, in seconds, after which a verifier that sends nothing about a generation counts as lost. Less than a client's
own patience, 30 s: after that the client is gone, and asking the next verifier would be useless."""


class Relay:
    """Runs one text to its end, over as many calls as necessary. `ResumableGeneration` decides when and where."""

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        upstreams: Upstreams,
        draft_model: DraftModel,
        timeout_s: float | None,
        resume_timeout_s: float,
        *,
        index: int = 0,
    ) -> None:
        """
        Args:
            request: The application's request, with the seed set.
            upstreams: Verifiers to dial.
            draft_model: Model that drafts, if it is ready.
            timeout_s: Time until the application's deadline; None means there is none.
            resume_timeout_s: Seconds for which a generation that has begun looks for a verifier to go on with.
            index: Which of the texts that the request asks for.
        """
        self._index, self._upstreams, self._draft_model = index, upstreams, draft_model
        self._state = ResumableGeneration(
            request_of(request, index),
            upstreams.replicas,
            time.monotonic(),
            timeout_s=timeout_s,
            resume_timeout_s=resume_timeout_s,
            stall_timeout_s=MAX_SILENCE_S,
            wait_s=0.0,  # the application knows better how long it wants to wait
        )
        self._prompt_token_ids = tuple(request.prompt.token_ids.token_ids)
        self._upstream: Upstream | None = None
        """The current verifier. None means that the next one has to be chosen."""
        self._session_id = ""
        """The text's name in the cloud's logs; empty before a verifier has taken it."""
        self._absence: Absence | None = None
        self._why_missing = ""
        """The reason why it had no drafts of this edge; None if it had some, or needs none."""
        self._was_overwritten = False

    def follow(self, elder: Relay) -> None:
        """Begins at the verifier of another text of the request, which has read the prompt there.

        The request has begun by then: this text keeps looking for a verifier, and only for one with the same model.
        """
        self._state.follow(elder._state)
        self._upstream, self._prompt_token_ids = elder._upstream, elder._prompt_token_ids

    async def run(self, write: Write) -> None:
        """Returns when the application has everything, as `write` sends it. Raises the last error of the cloud,
        AioRpcError or RpcError."""
        self._write = write
        try:
            while self._state.phase is not Phase.FINISHED:
                number = self._state.begin(time.monotonic(), None if self._upstream is None else self._upstream.number)
                upstream = self._upstream = self._upstreams[number]
                try:
                    await self._attempt(upstream)
                except (grpc.aio.AioRpcError, RpcError) as failure:
                    await self._after(upstream, failure)
        finally:
            self._state.end()

    async def _after(self, upstream: Upstream, failure: Failure) -> None:
        """Returns when it is time for the next attempt; raises the failure if there is none."""
        if self._state.phase is Phase.FINISHED:
            return  # the application has had the last event: how the call ends after it is of no interest
        was_overwritten, self._was_overwritten = self._was_overwritten, is_overwritten(failure)
        if self._was_overwritten and not was_overwritten:
            return  # again, at first without drafts: a draft on its way can hide the status of the call
        if self._was_overwritten:
            # Hidden twice in a row: it is only known that the verifier has ended the call.
            failure = self._ended_early(upstream)
        pause_s = self._state.on_error(time.monotonic(), code_of(failure), details_of(failure))
        self._upstreams.on_failure(upstream, failure)
        self._upstream = None
        if pause_s is None:
            raise failure
        if self._session_id:
            upstream.state.num_reconnects += 1
            log.warning("session.interrupted", session_id=self._session_id, reason=text_of(failure))
        await asyncio.sleep(pause_s)

    async def _attempt(self, upstream: Upstream) -> None:
        """Makes one call, or two if the first is refused because of its drafts."""
        target = await upstream.info(self._time_left())
        if (lost := self._state.check_model(target.model)) is not None:
            raise Unavailable(lost.reason)
        request = self._state.request()
        method = METHODS_FROM_PROTO.get(request.speculation.method or target.default_method)
        # None is a number that this edge does not know. The cloud may know it, or refuses it with its own message.
        if method is None or not method.has_draft_model:
            await self._generate(upstream, request)
            return
        reason, absence = self._draft_model.why_not(target.model), self._draft_model.absence(target.model)
        if not reason:
            drafter = self._draft_model.drafter
            assert drafter is not None
            absence = Absence.UNUSABLE  # if it is the verifier that does not take the drafts
            with current_span().calling(COLLABORATE, upstream.state.address) as span:
                reason = await self._collaborate(upstream, request, drafter, target, span.metadata)
        if reason:
            log.warning("session.without_drafts", reason=reason)
            self._absence, self._why_missing = absence, reason
            # A cloud without a speculator would refuse the method, and a generation must not fail because it lacks
            # drafts.
            request.speculation.allow_fallback = True
            await self._generate(upstream, request)

    async def _generate(self, upstream: Upstream, request: verifier_pb2.GenerateRequest) -> None:
        """Makes a call without drafts of this edge."""
        with current_span().calling(GENERATE, upstream.state.address) as span:
            call = upstream.stub(span.metadata).Generate(request, timeout=self._time_left())
            try:
                async for response in self._responses(call):
                    await self._pass_on(response)
            finally:
                call.cancel()
        self._check_finished(upstream)

    async def _collaborate(
        self,
        upstream: Upstream,
        request: verifier_pb2.GenerateRequest,
        drafter: Drafter,
        target: verifier_pb2.GetInfoResponse,
        metadata: Metadata,
    ) -> str:
        """Makes a call with drafts. Returns why the verifier refuses them; empty means that it took them."""
        collaboration = Collaboration(
            request,
            self._prompt_token_ids,
            drafter,
            target,
            index=self._index,
            may_open_early=not self._was_overwritten,
        )
        with closing(collaboration):
            call = upstream.stub(metadata).Collaborate(collaboration.requests(), timeout=self._time_left())
            has_begun = False
            try:
                async for response in self._responses(call):
                    has_begun = True
                    event = collaboration.on_response(response)
                    # Kept for the next call, which can then draft from its beginning.
                    self._prompt_token_ids = collaboration.prompt_token_ids
                    if event is not None:
                        await self._pass_on(event)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or has_begun:
                    raise
                # If the drafts were not the reason, the plain call will be refused with the same message.
                upstream.forget_info()
                return error.details() or error.code().name
            finally:
                call.cancel()
        self._check_finished(upstream)
        return ""

    async def _responses(self, call: Any) -> AsyncIterator[Any]:
        """Yields the responses of a call. Raises Unavailable if the verifier is silent for too long."""
        while True:
            try:
                async with asyncio.timeout(self._state.await_message(time.monotonic())):
                    response = await call.read()
            except TimeoutError:
                raise Unavailable(self._state.on_silence(time.monotonic()).reason) from None
            if response is grpc.aio.EOF:
                return
            yield require_message(response)

    async def _pass_on(self, response: verifier_pb2.GenerateResponse) -> None:
        """Passes an event on to the application, unless it has had it."""
        response.index = self._index
        taken = self._state.on_message(time.monotonic(), response)
        if isinstance(taken, Lost):
            raise Unavailable(taken.reason)
        match response.WhichOneof("event"):
            case "started":
                if self._session_id:
                    return  # it goes on
                self._session_id = response.started.session_id
            case "chunk":
                self._was_overwritten = False
            case "finished":
                summary = response.finished.summary
                if self._absence is not None:
                    summary.degraded = True
                    missing = missing_peer(Peer.EDGE, self._absence, summary.num_rounds, self._why_missing)
                    summary.missing_peers.append(missing)
        if taken is Taken.EMIT:
            await self._write(response)

    def _check_finished(self, upstream: Upstream) -> None:
        if self._state.phase is not Phase.FINISHED:
            raise self._ended_early(upstream)

    def _time_left(self) -> float | None:
        return self._state.remaining_s(time.monotonic())

    @staticmethod
    def _ended_early(upstream: Upstream) -> Unavailable:
        return Unavailable(f"{upstream.state.address} ended the stream without finishing the generation")
