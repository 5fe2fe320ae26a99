"""One text: from the cloud to an application, by as many calls as it takes.

Text and errors are the cloud's. What is added is the draft tree, and that a generation which has begun outlives the
verifier that began it: it goes on with the same seed and with the tokens so far, which is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TYPE_CHECKING

import grpc
import structlog

from outrider.core.statistics import Absence, Peer
from outrider.edge.choices import emitted, request_of
from outrider.edge.collaboration import Collaboration
from outrider.edge.draft_model import DraftModel
from outrider.edge.upstream import Failure, Upstream, Upstreams, code_of, responses, text_of
from outrider.peers.reconnecting import is_overwritten, wait_before_retry
from outrider.telemetry.tracing import COLLABORATE, GENERATE, Metadata, current_span
from outrider.v1 import verifier_pb2
from outrider.wire.channels import NOT_TAKEN
from outrider.wire.convert import INT32_MAX, missing_peer
from outrider.wire.errors import RpcError, Unavailable
from outrider.wire.resumption import difference, with_sampling
from outrider.wire.speculation import METHODS_FROM_PROTO

if TYPE_CHECKING:  # it imports torch, see there
    from outrider.speculator.drafter import Drafter

log = structlog.get_logger(__name__)

Write = Callable[[verifier_pb2.GenerateResponse], Awaitable[None]]
TimeLeft = Callable[[], float | None]

PASSING = NOT_TAKEN | {grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Statuses of a verifier, or of a proxy before it, after which another one, or the same one later, may serve."""


class Relay:
    """Runs one text to its end, over as many calls as it takes.

    The client SDK resumes in the same way (`outrider_client.retries`). Here a call may bring drafts, and events pass
    through as messages. Shared could be the state: tokens so far, failures in a row, the time since which the cloud is
    lost, and the check that a verifier serves the model that began the text.
    """

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        upstreams: Upstreams,
        draft_model: DraftModel,
        time_left: TimeLeft,
        resume_timeout_s: float,
        *,
        index: int = 0,
    ) -> None:
        """
        Args:
            request: The application's, with the seed set.
            upstreams: Verifiers to dial.
            draft_model: Drafts, if it is ready.
            time_left: Returns the seconds until the application's deadline; None means there is none.
            resume_timeout_s: Seconds that a generation which has begun looks for a verifier to go on with.
            index: Which of the texts that the request asks for.
        """
        self._request, self._index = request_of(request, index), index
        self._upstreams, self._draft_model = upstreams, draft_model
        self._time_left, self._resume_timeout_s = time_left, resume_timeout_s
        self._prompt_token_ids = tuple(request.prompt.token_ids.token_ids)
        self._upstream: Upstream | None = None
        """The verifier that it is at. None means that the next one is to be chosen."""
        self._started: verifier_pb2.Started | None = None
        self._target: verifier_pb2.GetInfoResponse | None = None
        self._num_characters = self._num_characters_before = 0
        """Characters that the application has had of all calls, and of those before this one."""
        self._absence: Absence | None = None
        self._why_missing = ""
        """The reason for which it had no drafts of this edge; None if it had some, or needs none."""
        self._has_begun = self._is_finished = self._has_rest = False
        self._was_overwritten = False
        self._lost_at: float | None = None
        self._heard_at = 0.0
        self._num_failures: list[int] = []
        """Calls that have failed since the last token, by verifier."""
        self._num_pauses = 0
        self._forget_failures()

    def follow(self, elder: Relay) -> None:
        """Begins where another text of the request did, which has read the prompt there.

        The request has begun by then: this text goes on looking for a verifier, and for one of the same model only.
        """
        self._has_begun, self._target, self._prompt_token_ids = True, elder._target, elder._prompt_token_ids
        if elder._upstream is not None:
            self._upstream = elder._upstream
            self._upstreams.begin(self._upstream, self)

    async def run(self, write: Write) -> None:
        """Returns when the application has everything, as `write` sends it. Raises the last error of the cloud,
        AioRpcError or RpcError."""
        self._write = write
        try:
            while not self._is_finished:
                if self._upstream is None:
                    self._upstream = self._upstreams.choose(self._num_failures, self)
                self._heard_at = self._now()
                try:
                    await self._attempt(self._upstream)
                except (grpc.aio.AioRpcError, RpcError) as failure:
                    await self._after(self._upstream, failure)
        finally:
            if self._upstream is not None:
                self._upstreams.end(self._upstream, self)

    async def _after(self, upstream: Upstream, failure: Failure) -> None:
        """Returns when it is time for the next attempt; raises the failure if there shall be none."""
        if self._is_finished:
            return  # the application has had the last event: how the call ends behind it is of no interest
        was_overwritten, self._was_overwritten = self._was_overwritten, is_overwritten(failure)
        if self._was_overwritten and not was_overwritten:
            return  # again, and at first without drafts: what is on its way can hide the status of the call
        if self._was_overwritten:
            # Hidden twice in a row: all that is known is that the verifier has ended the call.
            failure = self._ended_early(upstream)
        if code_of(failure) not in PASSING:
            raise failure
        self._upstreams.end(upstream, self)
        self._upstreams.leave(upstream, failure, self._now() - self._heard_at)
        self._upstream = None
        self._num_failures[upstream.number] += 1
        num_circles = min(self._num_failures)
        if not self._has_begun:
            if num_circles:
                raise failure  # all of them have been asked
        else:
            self._lost_at = self._lost_at or self._now()
            if self._now() - self._lost_at >= self._resume_timeout_s:
                raise failure
        if self._started is not None:
            upstream.state.num_reconnects += 1
            log.warning("session.interrupted", session_id=self._started.session_id, reason=text_of(failure))
        # A circle is one attempt at each verifier; there is no pause within one.
        if num_circles > self._num_pauses:
            self._num_pauses = num_circles
            await wait_before_retry(num_circles)

    def _forget_failures(self) -> None:
        self._num_failures = [0] * len(self._upstreams)
        self._num_pauses = 0

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _attempt(self, upstream: Upstream) -> None:
        """Makes one call, or two where the first is refused for its drafts."""
        target = await upstream.info(self._time_left())
        self._check_same(upstream, target)
        # Told apart from here on: the drafter has to know it, and the next verifier may have other defaults.
        assert self._target is not None
        request = with_sampling(self._request, self._target.model)
        method = METHODS_FROM_PROTO.get(request.speculation.method or target.default_method)
        # None is a number that this edge does not know. The cloud may know it, or refuses it in its own words.
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
            # A cloud without a speculator would refuse the method, and a generation shall not fail for want of drafts.
            request.speculation.allow_fallback = True
            await self._generate(upstream, request)

    async def _generate(self, upstream: Upstream, request: verifier_pb2.GenerateRequest) -> None:
        """Makes a call without drafts of this edge."""
        with current_span().calling(GENERATE, upstream.state.address) as span:
            call = upstream.stub(span.metadata).Generate(request, timeout=self._time_left())
            try:
                async for response in responses(call, upstream.state.address):
                    await self._pass_on(response, upstream)
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
                async for response in responses(call, upstream.state.address):
                    has_begun = True
                    event = collaboration.take(response)
                    # Kept for a next call, which can then draft from its beginning.
                    self._prompt_token_ids = collaboration.prompt_token_ids
                    if event is not None:
                        await self._pass_on(event, upstream)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or has_begun:
                    raise
                # If it was not for the drafts, the plain call will be refused in the same words.
                upstream.forget()
                return error.details() or error.code().name
            finally:
                call.cancel()
        self._check_finished(upstream)
        return ""

    async def _pass_on(self, response: verifier_pb2.GenerateResponse, upstream: Upstream) -> None:
        """Passes an event on to the application, and keeps what a next call must know."""
        self._heard_at = self._now()
        self._upstreams.answered(upstream)
        match response.WhichOneof("event"):
            case "started":
                self._upstreams.started(upstream, self, response.started.load)
                self._num_characters_before = self._num_characters
                if self._started is not None:
                    return  # it goes on
                self._started, self._has_begun = response.started, True
            case "chunk":
                if not response.chunk.token_ids:
                    # The rest of the text, which no token decides. A verifier that goes on behind it sends it again.
                    if self._has_rest:
                        return
                    self._has_rest = True
                emitted(self._request, self._index).extend(response.chunk.token_ids)
                # To the application all calls of the cloud are one, in whose text the ends are counted.
                ends = response.chunk.text_ends
                ends[:] = [min(self._num_characters_before + end, INT32_MAX) for end in ends]
                self._num_characters += len(response.chunk.text)
                self._forget_failures()
                self._lost_at, self._was_overwritten = None, False
            case "finished":
                summary = response.finished.summary
                if self._absence is not None:
                    summary.degraded = True
                    missing = missing_peer(Peer.EDGE, self._absence, summary.num_rounds, self._why_missing)
                    summary.missing_peers.append(missing)
        await self._write(response)
        self._is_finished = self._is_finished or response.HasField("finished")

    def _check_finished(self, upstream: Upstream) -> None:
        if not self._is_finished:
            raise self._ended_early(upstream)

    @staticmethod
    def _ended_early(upstream: Upstream) -> Unavailable:
        return Unavailable(f"{upstream.state.address} ended the stream without finishing the generation")

    def _check_same(self, upstream: Upstream, target: verifier_pb2.GetInfoResponse) -> None:
        """Raises Unavailable unless the model is the one that began the text: another would go on differently."""
        if not self._has_begun:
            self._target = target
        assert self._target is not None
        if problem := difference(self._target.model, target.model):
            raise Unavailable(f"{upstream.state.address} {problem}")
