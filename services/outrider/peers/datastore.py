"""The datastore as a model service sees it: copies of its wider tiers, questions, and records, none on the hot path.

Copies are searched in process (`core/retrieval/retriever.py`). The datastore is asked for everything else while a
forward runs, and records of what was accepted and rejected are sent to it in the background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.retriever import TierSource
from outrider.core.statistics import Absence
from outrider.core.tree import TokenId
from outrider.peers.channel import PeerState
from outrider.peers.lookups import Asker, Lookups, tiers_to_proto
from outrider.peers.recording import Recorder
from outrider.peers.tier_copies import TierCopies, TierWatch
from outrider.security.peer_channel import PeerSecurity
from outrider.telemetry.tracing import current_span
from outrider.v1 import datastore_pb2 as pb
from outrider.wire.speculation import retrieval_scope_to_proto

RETRIEVED = (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED, Source.RING)
"""Sources that are tiers of the datastore, wherever they were looked up."""
FLUSH_TIMEOUT_S = 2.0
"""Longest wait at the end of the process, for the last records to be acknowledged."""
EVERYTHING = RetrievalPlan()
"""Asks all tiers."""


class DatastorePeer:
    """The datastore that this process dials."""

    def __init__(
        self,
        address: str,
        tokenizer_hash: str,
        vocab_size: int,
        corpus: str = "",
        tenant: str = "",
        security: PeerSecurity | None = None,
    ) -> None:
        """Dials the datastore, and begins to copy the prior of this process's own tenant.

        Args:
            address: See `PeerState`.
            tokenizer_hash: Hash of the model's tokenizer; token ids mean nothing under another one.
            vocab_size: Tokens of the model's vocabulary.
            corpus: Name of the corpus whose prior is used.
            tenant: Owner of all sessions that name no other tenant.
            security: See `PeerState`.
        """
        self.state = PeerState("datastore", address, security)
        self._scope = pb.Scope(tokenizer_hash=tokenizer_hash, corpus=corpus, tenant=tenant, vocab_size=vocab_size)
        self._recorder = Recorder(self.state)
        self._lookups = Lookups(self.state)
        # Copying the prior takes a while, so it begins now and not with the first request.
        self._own_prior = self._watch(RetrievalScope.SESSION, tenant)
        self._copies = TierCopies(self._watch)

    def tiers(self, scope: RetrievalScope, tenant: str | None = None) -> TierSource:
        """Returns copies of the tiers of a scope. The first request for a scope begins them, so they start empty.

        Args:
            scope: The tiers that sessions may read.
            tenant: Owner of the session; None means this process's own.
        """
        own = self._scope.tenant
        if scope is RetrievalScope.SESSION and tenant in (None, own):
            return self._own_prior
        return self._copies.get(scope, own if tenant is None else tenant)

    def _watch(self, scope: RetrievalScope, tenant: str) -> TierWatch:
        return TierWatch(self.state, self._scope_of(retrieval_scope_to_proto(scope), tenant))

    def retrieve(
        self,
        session_id: str,
        committed: Sequence[TokenId],
        scope: RetrievalScope,
        contribute: bool,
        on_answer: Callable[[int, Continuation], None],
        on_lost: Callable[[Absence], None],
        plan: RetrievalPlan | None = EVERYTHING,
        tenant: str | None = None,
    ) -> RetrievalStream:
        """Begins a session.

        Args:
            session_id: Id of the session, for the datastore's session tier.
            committed: Token ids of the prompt, and those generated so far. The caller adds to it what is committed
                later, and calls `record_verdict`.
            scope: The tiers that the session may read.
            contribute: True if other sessions of the scope may read this one's tokens.
            on_answer: Called on the event loop with the number of tokens before the continuation, and with it.
            on_lost: Called on the event loop with the reason when a lookup will not be answered.
            plan: Says which tiers are asked, and with how much context; None means that the session only records.
            tenant: Owner of the session; None means this process's own.
        """
        session_scope = self._scope_of(retrieval_scope_to_proto(scope), tenant, session_id, contribute)
        tiers = tiers_to_proto(() if plan is None else plan.tiers)
        run_len = 0 if plan is None else plan.whole_run_len
        asker = Asker(session_scope, on_answer, on_lost, tiers, run_len, current_span().trace_budget())
        return RetrievalStream(self._recorder, self._lookups, asker, committed, plan)

    def _scope_of(
        self, retrieval_scope: int, tenant: str | None, session_id: str = "", contribute: bool = False
    ) -> pb.Scope:
        scope = pb.Scope()
        scope.CopyFrom(self._scope)
        scope.tenant = self._scope.tenant if tenant is None else tenant
        scope.retrieval_scope = retrieval_scope  # type: ignore[assignment]  # an int, as everywhere on the wire
        scope.session_id, scope.contribute = session_id, contribute
        return scope

    async def close(self) -> None:
        """Sends the last records, then closes the channel."""
        # The recorder first: closing the channel would cut off the stream that carries its last records.
        await self._recorder.close(FLUSH_TIMEOUT_S)
        self._lookups.stop()
        self._own_prior.stop()
        self._copies.stop()
        await self.state.close()


class RetrievalStream:
    """Sends one session's lookups and records. Lives on the event loop."""

    def __init__(
        self,
        recorder: Recorder,
        lookups: Lookups,
        asker: Asker,
        committed: Sequence[TokenId],
        plan: RetrievalPlan | None,
    ) -> None:
        self._recording = recorder.open(asker.scope, committed)
        self._lookups, self._asker, self._plan = lookups, asker, plan

    def record_verdict(self, sources: Sequence[Source], rejected: Sequence[TokenId] = ()) -> None:
        """Records the tokens that a round has added to the committed ones: accepted draft tokens, and the target's own
        token after them.

        Args:
            sources: Source of each of these tokens.
            rejected: Drafted tokens in a row that the last of these tokens replaces; empty means that there are none.
        """
        rejection, plan = None, self._plan
        if rejected and plan is not None and Source.REJECTED in plan.tiers:
            context = self._recording.committed[-plan.context_len - 1 : -1]
            rejection = pb.Rejection(context_token_ids=context, rejected_token_ids=rejected)
        accepted = Counter(source for source in sources if source in RETRIEVED)
        self._recording.add_verdict(len(sources), rejection, accepted)

    def look_up(self, behind: Sequence[TokenId] = ()) -> None:
        """Asks what follows the committed tokens and the tokens `behind` them. Does nothing without a plan."""
        if self._plan is None:
            return
        committed, length = self._recording.committed, self._plan.context_len
        context = [*committed[-length:], *behind][-length:]
        self._lookups.ask(self._asker, pb.Query(base_len=len(committed) + len(behind), context_token_ids=context))

    def close(self) -> None:
        """Ends the session: its last records are sent in the background."""
        self._lookups.close_asker(self._asker)
        self._recording.end()
