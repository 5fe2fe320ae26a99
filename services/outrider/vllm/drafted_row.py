"""One session of vLLM's as its drafters see it: the part of a verifier's session that is not the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.auto.strategies import opening_params, params_of
from outrider.core.costs import path_probabilities
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.retriever import NO_COPIES, TierSource
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.speculation import Steering
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft, Node, TokenId
from outrider.peers.datastore import DatastorePeer, RetrievalStream
from outrider.peers.fleet import SpeculatorFleet
from outrider.peers.speculator import Speculation, SpeculationSpec
from outrider.rounds.drafter_link import DrafterLink, Link
from outrider.rounds.retrieval import SessionRetrieval
from outrider.rounds.selection import next_chain, next_nodes
from outrider.rounds.strategy_choice import StrategyChoice
from outrider.rounds.timings import EngineTimings


class Peers(NamedTuple):
    """The services that draft. Live on the event loop."""

    speculators: SpeculatorFleet | None
    datastore: DatastorePeer | None

    @property
    def are_there(self) -> bool:
        """True if any of them has answered when it was last needed. May be read in any thread."""
        speculators = [] if self.speculators is None else self.speculators.peers
        is_there = any(speculator.state.is_connected for speculator in speculators)
        return is_there or (self.datastore is not None and self.datastore.state.is_connected)

    def tiers(self, spec: SessionSpec) -> TierSource | None:
        """Returns copies of the tiers in which a session looks; None means that it does not ask the datastore."""
        plan = target_plan(spec.speculation)
        if self.datastore is None or plan is None or not plan.tiers:
            return None
        if plan.is_remote or not plan.is_in_process:
            return NO_COPIES
        return self.datastore.tiers(spec.speculation.retrieval_scope)


class Chain(NamedTuple):
    """What is drafted after a text. Never changes: the engine's thread reads it while the loop makes the next one."""

    base_len: int
    """Tokens of the text."""
    nodes: tuple[Node, ...] = ()
    token_ids: tuple[TokenId, ...] = ()
    probabilities: tuple[float, ...] = ()
    """For each token, that the target says all up to it."""
    wish_ms: float = 0.0
    """How long a first token is worth waiting for, if there is none; 0 if none comes."""

    def beginning(self, length: int) -> Chain:
        """Returns its first tokens."""
        return Chain(self.base_len, self.nodes[:length], self.token_ids[:length], self.probabilities[:length])


class DraftedRow:
    """Drafts for one session: takes commits and drafts in, and says what follows. Lives on the event loop.

    Listens to the drafter (`SpeculationListener`).
    """

    def __init__(
        self,
        spec: SessionSpec,
        peers: Peers,
        timings: EngineTimings,
        clock: Callable[[], float],
        on_news: Callable[[DraftedRow], object],
    ) -> None:
        """
        Args:
            spec: The session, with all tokens so far as its prompt.
            peers: The services that draft.
            timings: What all sessions have measured.
            clock: Returns the time in seconds.
            on_news: Called with this row when what follows its text may have changed.
        """
        self._generation = Session(spec)
        self._peers, self._timings, self._clock, self._on_news = peers, timings, clock, on_news
        has_drafter = peers.speculators is not None and spec.speculation.method.has_draft_model
        self.choice = StrategyChoice(spec, timings)
        self.choice.set_attached(has_drafter)
        self._drafter = DrafterLink(
            self._generation,
            self.choice.strategy,
            timings,
            has_drafter=has_drafter,
            is_probing=self.choice.is_probing,
        )
        plan = target_plan(spec.speculation)
        self._retrieval: SessionRetrieval | None = None
        if plan is not None:
            self._retrieval = SessionRetrieval(self._generation, plan, timings, peers.tiers(spec))
        self._speculation: Speculation | None = None
        self._steering = Steering()
        self._lookups: RetrievalStream | None = None
        self._open_lookups()
        if not self.choice.strategy.is_plain:
            self._open_speculation()

    @property
    def spec(self) -> SessionSpec:
        """The session."""
        return self._generation.spec

    @property
    def length(self) -> int:
        """Tokens of its text."""
        return len(self._generation.committed)

    def close(self) -> None:
        """Ends the session on all servers."""
        if self._speculation is not None:
            self._speculation.close()
        if self._lookups is not None:
            self._lookups.close()

    def _open_lookups(self) -> None:
        params, datastore = self.spec.speculation, self._peers.datastore
        if datastore is None or not (params.retrieves or params.contribute):
            return
        self._lookups = datastore.retrieve(
            self.spec.session_id,
            self._generation.committed,
            params.retrieval_scope,
            params.contribute,
            self._on_continuation,
            self._on_datastore_lost,
            target_plan(params),
        )
        self._lookups.look_up()

    def _open_speculation(self) -> None:
        speculators = self._peers.speculators
        if speculators is None or not self.spec.speculation.method.has_draft_model or self._speculation is not None:
            return
        spec = self.spec
        opening = SpeculationSpec(
            spec.session_id,
            len(spec.prompt_token_ids),
            spec.sampling,
            opening_params(spec.speculation),
            self._drafter.max_forward_us,
        )
        self._speculation = speculators.speculate(opening, self._generation.committed, self)
        if self.choice.is_auto and not self.choice.is_first:
            self._steer(Steering(params_of(self.choice.strategy, spec.speculation)))

    # From vLLM.

    def commit(self, token_ids: Sequence[TokenId], nodes: Sequence[Node], step_ms: float) -> list[Verdict]:
        """Commits what a step has drawn.

        Args:
            token_ids: Its tokens.
            nodes: The chain that it verified: the tokens begin with those of its nodes that were accepted.
            step_ms: Time of the step. 0: it is no evidence.

        Returns:
            Verdicts on the nodes, and on tokens that came without any.
        """
        now, verdicts, left = self._clock(), [], list(token_ids)
        while left:
            verdict = self._generation.apply(nodes, left)
            del left[: len(verdict.token_ids)]
            verdicts.append(verdict)
            self._drafter.learn_verdict(nodes, verdict.num_accepted)
            if self._retrieval is not None:
                rows = (*verdict.accepted_rows, *(() if verdict.rejected_row is None else (verdict.rejected_row,)))
                judged = [nodes[row - 1] for row in rows]
                self._retrieval.learn(judged, verdict, looks_up=self.choice.strategy.retrieval)
            if self._lookups is not None:
                self._lookups.record_verdict(verdict.sources, verdict.rejected_token_ids)
            nodes = ()
        if self._speculation is not None:
            self._speculation.send_commit()
        self._choose(len(token_ids), step_ms)
        self._drafter.time_answer(now)
        self._look_ahead()
        return verdicts

    def _choose(self, num_tokens: int, step_ms: float) -> None:
        """Learns from a step, and chooses the strategy of the next one."""
        if not self.choice.is_auto:
            return
        if step_ms:
            self.choice.observe(num_tokens, step_ms, is_pending=self._drafter.state is Link.PENDING)
        self.choice.choose()
        self._drafter.follow(self.choice.strategy)

    def _look_ahead(self) -> None:
        """Continues the commit with what is known in process, asks the datastore, and tells the drafter the news."""
        retrieval, strategy = self._retrieval, self.choice.strategy
        if retrieval is not None:
            retrieval.begin_round()
            if strategy.retrieval:
                # Read first: choosing the chain adds to the tree what is known in process.
                was_known = bool(self._generation.tree.root.children)
                next_chain(self._generation, retrieval, strategy)
                retrieval.ask(was_known=was_known)
        self._ask()
        if (steering := self._drafter.next_steering()) is not None:
            self._steer(steering)

    def _ask(self) -> None:
        if self._retrieval is None or self._lookups is None or not self.choice.strategy.retrieval:
            return
        if (question := self._retrieval.take_question()) is not None:
            self._lookups.look_up(question)

    def _steer(self, steering: Steering) -> None:
        """Tells the drafter how to go on. Its stream is opened for the first method that drafts."""
        self._steering = self._steering.then(steering)
        if self._speculation is None and self._steering.speculation is not None and not self._steering.is_pause:
            self._open_speculation()
            steering = self._steering
        if self._speculation is not None:
            self._speculation.send_steering(steering)

    # From the drafter.

    def on_attached(self, forward_us: int) -> None:
        """See `SpeculationListener`."""
        self.choice.set_attached(True)
        self._timings.set_draft_ms(forward_us / 1e3)
        self._drafter.follow(self.choice.strategy)
        if self._drafter.attach(forward_us):
            self.choice.hold_drafts()
            self._drafter.follow(self.choice.strategy)
        self._on_news(self)

    def on_draft(self, draft: Draft) -> None:
        """See `SpeculationListener`."""
        now = self._clock()
        self._drafter.add_draft(draft, now, now)
        self._on_news(self)

    def on_detached(self, absence: Absence) -> None:
        """See `SpeculationListener`."""
        self._drafter.detach(Peer.SPECULATOR, absence)
        self.choice.set_attached(False)
        self._drafter.follow(self.choice.strategy)
        self._on_news(self)

    # From the datastore.

    def _on_continuation(self, base_len: int, continuation: Continuation) -> None:
        if self._retrieval is not None:
            self._retrieval.add(base_len, continuation)
            self._ask()
            self._on_news(self)

    def _on_datastore_lost(self, absence: Absence) -> None:
        if self._retrieval is not None:
            self._retrieval.lose()
            self._on_news(self)

    # To vLLM.

    def chain(self) -> Chain:
        """Returns what follows the text now."""
        generation = self._generation
        nodes = next_nodes(generation, self._retrieval, self.choice.strategy, self._timings)
        # A tail after a whole chain has no room in vLLM.
        del nodes[max(0, generation.max_chain_len) :]
        return Chain(
            len(generation.committed),
            tuple(nodes),
            tuple([node.token_id for node in nodes]),
            tuple(path_probabilities(nodes, generation.tree.root)),
            0.0 if nodes else self._wish_ms(),
        )

    def _wish_ms(self) -> float:
        if self._generation.max_chain_len < 1:
            return 0.0
        if self._drafter.is_drafting:
            # The first draft comes when the text is read, which may take many steps.
            return self._drafter.patience_ms() if self._drafter.state is Link.LIVE else 0.0
        return 0.0 if self._retrieval is None else self._retrieval.patience_ms()
