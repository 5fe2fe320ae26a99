"""One Generate or Collaborate call on the event loop: between the engine's thread, the peers' streams and the
client's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.core.ngrams import Continuation
from outrider.core.retrieval import NO_COPIES
from outrider.core.retrieval_plan import target_plan
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Statistics
from outrider.core.tree import Draft, DraftCost
from outrider.rpc.errors import RpcError, Unavailable
from outrider.rpc.peers import SpeculationSpec, SpeculationStream, SpeculatorPeer
from outrider.rpc.retrieval import DatastorePeer, RetrievalStream
from outrider.verifier.continuations import Question
from outrider.verifier.engine import Engine
from outrider.verifier.job import Wishes
from outrider.verifier.pilot import opening_params

HIGH_WATER = 64
"""Verdicts that a slow reader may be behind before its generation pauses."""


class Generation:
    """Starts the work when constructed; `close` ends it everywhere."""

    def __init__(
        self,
        spec: SessionSpec,
        engine: Engine,
        speculator: SpeculatorPeer | None,
        datastore: DatastorePeer | None,
        tenant: str | None = None,
    ) -> None:
        """`tenant`: whom it belongs to; None = this verifier's own."""
        self.spec = spec
        self.statistics = Statistics()
        """Complete once the last verdict is there."""
        self._engine = engine
        self._verdicts: asyncio.Queue[Verdict | RpcError] = asyncio.Queue()
        self._is_paused = False
        self._speculation: SpeculationStream | None = None
        self._retrieval: RetrievalStream | None = None
        committed = spec.prompt_token_ids + spec.resume_token_ids
        retrieves = datastore is not None and spec.speculation.retrieves
        plan, tiers = target_plan(spec.speculation), None
        if datastore is not None and plan is not None:
            scope = spec.speculation.retrieval_scope
            tiers = datastore.tiers(scope, tenant) if plan.is_in_process else NO_COPIES
        engine.open(spec, self, tiers, has_drafter=speculator is not None)
        if speculator is not None and spec.speculation.method.has_draft_model:
            opened = opening_params(spec.speculation)
            told = SpeculationSpec(spec.session_id, len(spec.prompt_token_ids), spec.sampling, opened)
            self._speculation = speculator.speculate(told, committed, self)
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

    async def verdicts(self) -> AsyncIterator[Verdict]:
        """The rounds' verdicts, until the one with a finish reason.

        Raises:
            Unavailable: the engine could not go on.
        """
        while True:
            item = await self._verdicts.get()
            if isinstance(item, RpcError):
                raise item
            if self._is_paused and self._verdicts.qsize() < HIGH_WATER // 2:
                self._is_paused = False
                self._engine.pause(self.spec.session_id, False)
            yield item
            if item.finish_reason is not None:
                return

    def close(self) -> None:
        """Ends the work on all servers. Idempotent."""
        self._engine.cancel(self.spec.session_id)
        if self._speculation is not None:
            self._speculation.close()
        if self._retrieval is not None:
            self._retrieval.close()

    # From the engine.

    def on_verdict(self, verdict: Verdict, statistics: Statistics, wishes: Wishes) -> None:
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
        self._verdicts.put_nowait(verdict)
        if self._verdicts.qsize() >= HIGH_WATER and not self._is_paused:
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
        self._verdicts.put_nowait(error)

    # From the peers.

    def on_attached(self) -> None:
        """A drafter's stream begins."""
        self._engine.attach(self.spec.session_id)

    def on_draft(self, draft: Draft, cost: DraftCost) -> None:
        """New nodes."""
        self._engine.draft(self.spec.session_id, draft, cost)

    def on_detached(self) -> None:
        """The drafter is gone."""
        self._engine.detach(self.spec.session_id)

    def on_continuation(self, base_len: int, continuation: Continuation) -> None:
        """What the datastore found."""
        self._engine.continuation(self.spec.session_id, base_len, continuation)

    def on_datastore_lost(self) -> None:
        """The datastore is gone."""
        self._engine.lose_datastore(self.spec.session_id)
