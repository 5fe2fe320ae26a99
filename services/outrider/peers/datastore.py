"""The datastore as a model service sees it: copies of its wider tiers, questions, and records, none on the hot path.

What is known in process is found there (`core/retrieval/retriever.py`). The datastore is asked for what is not, while a
forward runs; it is told what was accepted and refused, in the background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.retriever import TierSource
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
"""At the end of the process, for the last records."""
EVERYTHING = RetrievalPlan()


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
        """`tenant`: whom sessions belong to that are not said to be another's."""
        self.state = PeerState("datastore", address, security)
        self._scope = pb.Scope(tokenizer_hash=tokenizer_hash, corpus=corpus, tenant=tenant, vocab_size=vocab_size)
        self._recorder = Recorder(self.state)
        self._lookups = Lookups(self.state)
        # The prior takes a while: better now than with the first request.
        self._own_prior = self._watch(RetrievalScope.SESSION, tenant)
        self._copies = TierCopies(self._watch)

    def tiers(self, scope: RetrievalScope, tenant: str | None = None) -> TierSource:
        """Copies of the tiers of a scope. The first request for a scope makes them come. `tenant`: None = this
        process's own."""
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
        on_lost: Callable[[], None],
        plan: RetrievalPlan | None = EVERYTHING,
        tenant: str | None = None,
    ) -> RetrievalStream:
        """Begins a session. `on_answer(base_len, continuation)` and `on_lost()` are called on the event loop. Without a
        plan it only records. `tenant`: None = this process's own."""
        said = self._scope_of(retrieval_scope_to_proto(scope), tenant, session_id, contribute)
        tiers = tiers_to_proto(() if plan is None else plan.tiers)
        asker = Asker(said, on_answer, on_lost, tiers, current_span().trace_budget())
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
        """Sends the last records, then hangs up."""
        await self._recorder.close(FLUSH_TIMEOUT_S)
        self._lookups.stop()
        self._own_prior.stop()
        self._copies.stop()
        await self.state.close()


class RetrievalStream:
    """One session's questions and records. Lives on the event loop."""

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

    def commit(self, token_ids: Sequence[TokenId], rejected: TokenId | None, sources: Sequence[Source]) -> None:
        """What the target said, and where it came from. `rejected` is the chain token that it refused, in whose place
        the last of token_ids stands."""
        rejection, plan = None, self._plan
        if rejected is not None and token_ids and plan is not None and Source.REJECTED in plan.tiers:
            context = [*self._recording.committed[-plan.context_len :], *token_ids[:-1]][-plan.context_len :]
            rejection = pb.Rejection(
                context_token_ids=context, rejected_token_ids=[rejected], continuation_token_ids=token_ids[-1:]
            )
        self._recording.commit(token_ids, rejection, Counter(source for source in sources if source in RETRIEVED))

    def look_up(self, behind: Sequence[TokenId] = ()) -> None:
        """Asks what follows the committed tokens and the tokens `behind` them. Nothing to ask without a plan."""
        if self._plan is None:
            return
        committed, length = self._recording.committed, self._plan.context_len
        context = [*committed[-length:], *behind][-length:]
        self._lookups.ask(self._asker, pb.Query(base_len=len(committed) + len(behind), context_token_ids=context))

    def close(self) -> None:
        """Ends the session: its last records are sent in the background."""
        self._lookups.close(self._asker)
        self._recording.end()
