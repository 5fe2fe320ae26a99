"""One Generate or Collaborate call on the event loop: between the engine's thread, the peers' streams and the
client's stream."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from outrider.core.auto.strategies import opening_params
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.retriever import NO_COPIES, TierSource
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import SessionSpec, Verdict, ending_of
from outrider.core.speculation import Steering
from outrider.core.statistics import Absence, Peer, Statistics, Traffic
from outrider.core.tree import Draft
from outrider.peers.datastore import DatastorePeer, RetrievalStream
from outrider.peers.speculator import Speculation, SpeculationSpec, Speculators
from outrider.verifier.engine import Engine
from outrider.verifier.listener import NoRoom, PeerRequests, Reading
from outrider.verifier.session import VerifySession
from outrider.wire.errors import Internal, InvalidArgument, ResourceExhausted, RpcError, Unavailable

_Item = TypeVar("_Item")

HIGH_WATER = 64
"""Verdicts that may wait for a slow reader before its generation pauses."""
NEWS_S = 1.0
"""Silence, in seconds, after which the engine is asked for a reason and the caller is told of it: a server that has no
room yet, or reads a long prompt, should not be taken for dead, and one whose engine hangs should."""


class Generation:
    """Runs one generation: starts the work when constructed, if any is left; `close` ends it everywhere.

    Listens to the engine (`GenerationListener`) and to the drafter (`SpeculationListener`). Lives on the event loop.
    """

    def __init__(
        self,
        spec: SessionSpec,
        engine: Engine,
        speculators: Speculators | None,
        datastore: DatastorePeer | None,
        tenant: str | None = None,
        *,
        brings_drafts: bool = False,
        salt: str | None = None,
        elder_id: str = "",
    ) -> None:
        """
        Args:
            spec: The request.
            engine: Runs the rounds.
            speculators: One of them drafts. None means that nothing drafts, or that the caller does.
            datastore: Finds continuations. None means that this server has no datastore.
            tenant: Tenant of the generation. None means this verifier's own.
            brings_drafts: True if the caller supplies the drafts itself.
            salt: Generations of the same salt find each other's prefixes. None means that this one shares none.
            elder_id: See `Engine.open`.
        """
        self.spec = spec
        self.statistics = Statistics()
        """Complete once the last verdict is there."""
        self.traffic = Traffic()
        """Bytes exchanged with the drafter."""
        self.why_missing: dict[tuple[Peer, Absence], str] = {}
        """Known reasons why peers were missing, in words."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self.num_cached_prompt_tokens = 0
        """Tokens of the prompt whose keys and values were cached when the generation was admitted."""
        self._has_room = False
        """True once the generation was admitted, or has failed."""
        self._admission: asyncio.Queue[NoRoom | Reading | RpcError | None] = asyncio.Queue()
        """News until then, and the outcome; None means that there is room."""
        self._events: asyncio.Queue[Verdict | Steering | NoRoom | Reading | RpcError] = asyncio.Queue()
        """Events after that."""
        self._brings_drafts, self._salt = brings_drafts, salt
        self._is_paused = self._is_closed = False
        self._datastore = datastore
        self._speculators = speculators if spec.speculation.method.has_draft_model else None
        # The engine's thread decides when the drafter is opened, and does not have the trace's context.
        self._context = contextvars.copy_context()
        # The peers' streams read this list and send its unsent part: only `on_verdict` appends to it.
        self._committed = [*spec.prompt_token_ids, *spec.resume_token_ids]
        self._speculation: Speculation | None = None
        self._steering = Steering()
        """The latest steering of the drafter; a stream that is opened later begins with it."""
        self._retrieval: RetrievalStream | None = None
        if (ending := ending_of(spec)) is not None:
            self._events.put_nowait(ending)
            self._end_admission(None)
            return
        # The target's prefill takes longest: it begins before the peers hear of the session. Its verdicts come through
        # the loop, so none arrives before the streams below are opened.
        has_drafter = speculators is not None or brings_drafts
        engine.open(spec, self, _tiers(spec, datastore, tenant), has_drafter=has_drafter, salt=salt, elder_id=elder_id)
        if brings_drafts:
            self._events.put_nowait(Steering(opening_params(spec.speculation)))
        if not spec.speculation.method.is_auto:
            self._open_speculation()
        if datastore is not None:
            self._open_retrieval(datastore, tenant)

    def _open_speculation(self, max_forward_us: int = 0) -> None:
        if self._speculators is None or self._speculation is not None:
            return
        spec = self.spec
        params = opening_params(spec.speculation, shares_gpu=spec.shares_gpu)
        opening = SpeculationSpec(
            spec.session_id,
            len(spec.prompt_token_ids),
            spec.sampling,
            params,
            max_forward_us,
            self._salt or "",
            spec.structure,
        )
        self._speculation = self._context.run(self._speculators.speculate, opening, self._committed, self)
        self.traffic = self._speculation.traffic

    def _steer(self, steering: Steering) -> None:
        """Tells the drafter how to go on. The stream is opened for the first method that drafts: until then, the
        drafter costs nothing."""
        if self._brings_drafts:
            self._events.put_nowait(steering)
            return
        self._steering = self._steering.then(steering)
        if self._speculation is None and self._steering.speculation is not None and not self._steering.is_pause:
            self._open_speculation()
            steering = self._steering
        if self._speculation is not None:
            self._speculation.send_steering(steering)

    def _open_retrieval(self, datastore: DatastorePeer, tenant: str | None) -> None:
        spec, params = self.spec, self.spec.speculation
        plan = target_plan(params)
        # The verifier's own sources need no datastore, but the session may still be recorded for others.
        is_asked = plan is None or bool(plan.tiers)
        if params.retrieves and (is_asked or params.contribute):
            self._retrieval = datastore.retrieve(
                spec.session_id,
                self._committed,
                params.retrieval_scope,
                params.contribute,
                self.on_continuation,
                self.on_datastore_lost,
                plan if is_asked else None,
                tenant,
            )
            self._retrieval.look_up()

    async def waits(self) -> AsyncIterator[NoRoom | Reading]:
        """Yields that there is no room, about once a second until the engine has some for the generation.

        Raises:
            RpcError: the error that `fail` was given meanwhile: ResourceExhausted if there was no room in time.
        """
        while (item := await self._next(self._admission)) is not None:
            if isinstance(item, RpcError):
                raise item
            yield item

    async def events(self) -> AsyncIterator[Verdict | Steering | NoRoom | Reading]:
        """Yields the rounds' verdicts, until the one with a finish reason.

        To a caller that brings the drafts it also yields how to go on with them: once before the first verdict, and
        whenever that changes. If no verdict comes because the text is being read, or because the session has lost its
        room to others, it yields that about once a second.

        Raises:
            RpcError: the error that `fail` was given, after the verdicts before it: Unavailable if the engine could not
                go on.
        """
        while True:
            item = await self._next(self._events)
            if isinstance(item, RpcError):
                raise item
            # Well below the mark at which it pauses, so that it does not pause and resume with every verdict.
            if self._is_paused and self._events.qsize() < HIGH_WATER // 2:
                self._set_paused(False)
            yield item
            if isinstance(item, Verdict) and item.finish_reason is not None:
                return

    async def _next(self, queue: asyncio.Queue[_Item]) -> _Item:
        """Returns the next item. Asks the engine meanwhile why it is silent."""
        while True:
            try:
                async with asyncio.timeout(NEWS_S):
                    return await queue.get()
            except TimeoutError:
                self._engine.ask_for_news(self.spec.session_id)

    def _end_admission(self, error: RpcError | None) -> None:
        if not self._has_room:
            self._has_room = True
            self._admission.put_nowait(error)

    def fail(self, error: RpcError) -> None:
        """Ends the generation with an error."""
        self._end_admission(error)
        # Queued after the verdicts that are here already: the caller gets those first.
        self._events.put_nowait(error)

    def close(self) -> None:
        """Ends the work on all servers. Idempotent."""
        self._is_closed = True
        self._engine.close(self.spec.session_id)
        if self._speculation is not None:
            self._speculation.close()
        if self._retrieval is not None:
            self._retrieval.close()

    # From the engine.

    def on_begun(self, steering: Steering, max_forward_us: int) -> None:
        """Opens the drafter's stream, unless the session begins without drafts."""
        if self._is_closed:
            return
        if not steering.is_pause:
            self._open_speculation(max_forward_us)
        if steering.speculation is not None:
            self._steer(steering)

    def on_verdict(self, verdict: Verdict, statistics: Statistics, requests: PeerRequests) -> None:
        """Passes a verdict on: first to the peers, as their work takes longest, then to the caller."""
        self.statistics = statistics
        is_over = verdict.finish_reason is not None
        if is_over and self._speculation is not None:
            # Done here, as a slow reader delays `close`; and before the tokens are added, so that a drafter with unsent
            # commits is not sent the last one.
            self._speculation.close()
        self._committed.extend(verdict.token_ids)
        if self._speculation is not None and not is_over:
            self._speculation.send_commit()
        if self._retrieval is not None and verdict.token_ids:
            self._retrieval.record_verdict(verdict.sources, verdict.rejected_token_ids)
            if requests.question is not None and not is_over:
                self._retrieval.look_up(requests.question)
        self._events.put_nowait(verdict)
        if requests.steering is not None and not is_over and not self._is_closed:
            self._steer(requests.steering)
        if self._events.qsize() >= HIGH_WATER and not self._is_paused:
            self._set_paused(True)

    def on_admitted(self, num_cached_tokens: int) -> None:
        """Lets `waits` end."""
        if not self._has_room:
            # Only the first time: later it finds what it has computed itself.
            self.num_cached_prompt_tokens = min(num_cached_tokens, len(self.spec.prompt_token_ids))
        self._end_admission(None)

    def on_news(self, news: NoRoom | Reading) -> None:
        """Tells the caller why there is no verdict, unless something else is to be told by now."""
        queue = self._events if self._has_room else self._admission
        if queue.empty():
            queue.put_nowait(news)

    def on_no_room(self) -> None:
        """Ends the generation: others took all room for too long."""
        self.fail(ResourceExhausted("no room for this session in the pool of keys and values came free in time"))

    def on_broken(self, reason: str) -> None:
        """Ends the generation: its text cannot go on under its structure."""
        self.fail(InvalidArgument("structured_outputs", f"cannot be followed any further: {reason}"))

    def on_failure(self, is_own: bool) -> None:
        """Ends the generation: the engine could not go on. The caller is told not to retry what would fail again."""
        lost = Unavailable("the verifier lost this session; its log says why")
        self.fail(Internal() if is_own else lost)

    # From the drafter, to the engine.

    def on_attached(self, forward_us: int) -> None:
        """Announces that a drafter's stream begins."""
        self._post(lambda session: session.attach(forward_us))

    def on_draft(self, draft: Draft) -> None:
        """Adds new nodes."""
        arrived_at = time.perf_counter()  # the engine takes it in when its forward has ended
        self._post(lambda session: session.add_draft(draft, time.perf_counter(), arrived_at))

    async def drafts_taken_in(self) -> None:
        """Returns when the engine has the drafts so far. Never returns if the session has ended there."""
        taken_in = asyncio.Event()
        # The inbox is in order, so this comes after the drafts; events of asyncio may be set on the loop only.
        self._post(lambda _: self._loop.call_soon_threadsafe(taken_in.set))
        await taken_in.wait()

    def on_detached(self, absence: Absence) -> None:
        """Announces that the drafter is gone, and why."""
        peer = Peer.EDGE if self._brings_drafts else Peer.SPECULATOR
        if self._speculators is not None and not self._brings_drafts:
            told = [info.last_error for info in self._speculators.infos() if info.last_error]
            self.why_missing[peer, absence] = "; ".join(dict.fromkeys(told))
        self._post(lambda session: session.detach(peer, absence))

    # From the datastore, to the engine.

    def on_continuation(self, base_len: int, continuation: Continuation) -> None:
        """Adds what the datastore has found, and sends the question that results."""

        def add(session: VerifySession) -> None:
            question = session.add_continuation(base_len, continuation, time.perf_counter())
            # This runs on the engine's thread, and the stream lives on the loop.
            if question is not None and self._retrieval is not None:
                self._loop.call_soon_threadsafe(self._retrieval.look_up, question)

        self._post(add)

    def on_datastore_lost(self, absence: Absence) -> None:
        """Announces that the datastore is gone, and why."""
        if self._datastore is not None:
            self.why_missing[Peer.DATASTORE, absence] = self._datastore.state.last_error
        self._post(lambda session: session.lose_datastore(absence))

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._post(VerifySession.pause if is_paused else VerifySession.resume)

    def _post(self, action: Callable[[VerifySession], object]) -> None:
        self._engine.post(self.spec.session_id, action)


def _tiers(spec: SessionSpec, datastore: DatastorePeer | None, tenant: str | None) -> TierSource | None:
    """Returns copies of the tiers in which the target's side looks; None means that it does not ask the datastore."""
    plan = target_plan(spec.speculation)
    if datastore is None or plan is None or not plan.tiers:
        return None
    if plan.is_remote or not plan.is_in_process:
        return NO_COPIES
    return datastore.tiers(spec.speculation.retrieval_scope, tenant)
