"""One Generate or Collaborate call on the event loop: between the engine's thread, the peers' streams and the
client's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.core.auto.strategies import opening_params
from outrider.core.params import Steering
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import target_plan
from outrider.core.retrieval.retriever import NO_COPIES
from outrider.core.session import SessionSpec, Verdict, ending_of
from outrider.core.statistics import Statistics, Traffic
from outrider.core.tree import Draft
from outrider.peers.datastore import DatastorePeer, RetrievalStream
from outrider.peers.speculator import SpeculationSpec, SpeculationStream, SpeculatorPeer
from outrider.verifier.engine import Engine
from outrider.verifier.retrieval import Question
from outrider.verifier.session import PeerRequests
from outrider.wire.errors import RpcError, Unavailable

HIGH_WATER = 64
"""Verdicts that a slow reader may be behind before its generation pauses."""


class Generation:
    """Starts the work when constructed, if any is left; `close` ends it everywhere."""

    def __init__(
        self,
        spec: SessionSpec,
        engine: Engine,
        speculator: SpeculatorPeer | None,
        datastore: DatastorePeer | None,
        tenant: str | None = None,
        *,
        brings_drafts: bool = False,
    ) -> None:
        """
        Args:
            spec: The request.
            engine: Where it runs.
            speculator: Who drafts; None = nobody, or the caller.
            datastore: Where continuations come from.
            tenant: Whom it belongs to; None = this verifier's own.
            brings_drafts: Whether the caller supplies the drafts itself.
        """
        self.spec = spec
        self.statistics = Statistics()
        """Complete once the last verdict is there."""
        self.traffic = Traffic()
        """Between this verifier and whoever drafts."""
        self._engine = engine
        self._events: asyncio.Queue[Verdict | Steering | RpcError] = asyncio.Queue()
        self._brings_drafts = brings_drafts
        self._is_paused = False
        self._speculation: SpeculationStream | None = None
        self._retrieval: RetrievalStream | None = None
        if (ending := ending_of(spec)) is not None:
            self._events.put_nowait(ending)
            return
        committed = spec.prompt_token_ids + spec.resume_token_ids
        retrieves = datastore is not None and spec.speculation.retrieves
        plan, tiers = target_plan(spec.speculation), None
        if datastore is not None and plan is not None:
            scope = spec.speculation.retrieval_scope
            tiers = datastore.tiers(scope, tenant) if plan.is_in_process else NO_COPIES
        engine.open(spec, self, tiers, has_drafter=speculator is not None or brings_drafts)
        opened = opening_params(spec.speculation)
        if brings_drafts:
            self._events.put_nowait(Steering(opened))
        if speculator is not None and spec.speculation.method.has_draft_model:
            told = SpeculationSpec(spec.session_id, len(spec.prompt_token_ids), spec.sampling, opened)
            self._speculation = speculator.speculate(told, committed, self)
            self.traffic = self._speculation.traffic
        if datastore is not None and retrieves:
            params = spec.speculation
            self._retrieval = datastore.retrieve(
                spec.session_id,
                committed,
                params.retrieval_scope,
                params.contribute,
                self.on_continuation,
                self.on_datastore_lost,
                plan,
                tenant,
            )
            self._retrieval.look_up()

    async def events(self) -> AsyncIterator[Verdict | Steering]:
        """The rounds' verdicts, until the one with a finish reason; to a caller that brings the drafts, also how to go
        on with them: once before the first verdict, and whenever there is news.

        Raises:
            Unavailable: the engine could not go on.
        """
        while True:
            item = await self._events.get()
            if isinstance(item, RpcError):
                raise item
            if self._is_paused and self._events.qsize() < HIGH_WATER // 2:
                self._is_paused = False
                self._engine.pause(self.spec.session_id, False)
            yield item
            if isinstance(item, Verdict) and item.finish_reason is not None:
                return

    def close(self) -> None:
        """Ends the work on all servers. Idempotent."""
        self._engine.close(self.spec.session_id)
        if self._speculation is not None:
            self._speculation.close()
        if self._retrieval is not None:
            self._retrieval.close()

    # From the engine.

    def on_verdict(self, verdict: Verdict, statistics: Statistics, wishes: PeerRequests) -> None:
        """A round is over: the peers hear of it first, their work takes longest."""
        self.statistics = statistics
        is_over = verdict.finish_reason is not None
        if self._speculation is not None and not is_over:
            self._speculation.commit(verdict.token_ids)
            if wishes.steering is not None:
                self._speculation.steer(wishes.steering)
        if self._retrieval is not None and verdict.token_ids:
            self._retrieval.commit(verdict.token_ids, verdict.rejected_token_id, verdict.sources)
            if wishes.question is not None and not is_over:
                self._retrieval.look_up(wishes.question)
        self._events.put_nowait(verdict)
        if self._brings_drafts and wishes.steering is not None and not is_over:
            self._events.put_nowait(wishes.steering)
        if self._events.qsize() >= HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._engine.pause(self.spec.session_id, True)

    def on_question(self, question: Question) -> None:
        """What the datastore is asked next."""
        if self._retrieval is not None:
            self._retrieval.look_up(question)

    def on_failure(self) -> None:
        """The engine could not go on."""
        self.fail(Unavailable("the verifier lost this session; its log says why"))

    def fail(self, error: RpcError) -> None:
        """Ends the generation with an error."""
        self._events.put_nowait(error)

    # From the peers.

    def on_attached(self) -> None:
        """A drafter's stream begins."""
        self._engine.attach(self.spec.session_id)

    def on_draft(self, draft: Draft) -> None:
        """New nodes."""
        self._engine.draft(self.spec.session_id, draft)

    async def drafts_taken_in(self) -> None:
        """Returns when the engine has the drafts so far. If the session has ended there: never."""
        taken_in = asyncio.Event()
        self._engine.call_back(self.spec.session_id, taken_in.set)
        await taken_in.wait()

    def on_detached(self) -> None:
        """The drafter is gone."""
        self._engine.detach(self.spec.session_id)

    def on_continuation(self, base_len: int, continuation: Continuation) -> None:
        """What the datastore found."""
        self._engine.continuation(self.spec.session_id, base_len, continuation)

    def on_datastore_lost(self) -> None:
        """The datastore is gone."""
        self._engine.lose_datastore(self.spec.session_id)
