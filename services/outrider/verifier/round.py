"""One round of a generation: when it begins, what it verifies, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from outrider.core.auto.strategies import Strategy
from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Follower
from outrider.core.session import Session, Verdict
from outrider.core.statistics import RoundTime
from outrider.core.tree import Node, TokenId
from outrider.models.prefill import MIN_PREFILL_ROWS
from outrider.models.runner import KVCache, Segment
from outrider.rounds.drafter_link import DrafterLink, Link
from outrider.rounds.retrieval import SessionRetrieval
from outrider.rounds.selection import is_worth_verifying, next_chain, next_nodes
from outrider.rounds.timings import EngineTimings
from outrider.verifier.reports import SessionReports

DRAFTED = (Source.DRAFT, Source.GRAMMAR)
"""Sources of nodes that end the wait of a method that drafts first."""


class EmptyRoundReason(Enum):
    """Reasons why a round verifies nothing though its method would. The values are those of the metrics."""

    LOAD = "load"
    """Sessions share the rows of a forward, and none was left for drafts."""
    DRAFT_DOWN = "draft_down"
    """The speculator, or the caller that drafts, is gone."""
    NO_MATCH = "no_match"
    """The method only retrieves, and nothing was found."""
    DRAFT_PENDING = "draft_pending"
    """The drafter is there, and its first draft has not come: it reads the text."""
    NO_DRAFT = "no_draft"
    """The drafter has answered, with nothing that fits."""
    NOT_AWAITED = "not_awaited"
    """No draft was there, and waiting for one was worth nothing."""
    DRAFT_TIMEOUT = "draft_timeout"
    """A draft was waited for as long as it was worth, and has not come."""


class Forward(NamedTuple):
    """Describes the forward that has verified a round. Times are those of `time.perf_counter`."""

    started: float
    """Time at which it was planned."""
    ended: float
    """Time at which its draws were known."""
    duration_ms: float
    """The time that the device took for it."""
    num_rows: int = 0
    """Its rows, those of other sessions included."""


class Parts(NamedTuple):
    """Holds the parts of a session that its rounds work with."""

    generation: Session
    cache: KVCache
    drafter: DrafterLink
    retrieval: SessionRetrieval | None
    """The retrieval on this side. None: there is none."""
    reports: SessionReports
    timings: EngineTimings


class Round:
    """Holds the time from one commit of a generation to the next. Made anew after each commit, and owned by the
    engine's thread."""

    def __init__(self, parts: Parts, strategy: Strategy, began_at: float, *, is_typical: bool) -> None:
        """
        Args:
            parts: The parts of the session.
            strategy: The strategy that chooses the nodes.
            began_at: Time of the commit, in seconds.
            is_typical: False if this round's duration is not representative (one that reads a prompt).
        """
        self._parts = parts
        self.strategy, self.began_at, self.is_typical = strategy, began_at, is_typical
        self.patience_ms = 0.0
        """Longest time from the commit on that a draft or a continuation is waited for."""
        self.nodes: list[Node] = []
        """Nodes that it verifies: a chain, or a sub-tree, the most probable path first."""
        self.is_answered = False
        """True once a draft or a continuation has come that follows the commit."""
        self.waiting_since: float | None = None
        """Time at which it began to wait for one. None: it has not waited."""
        self.ready_since: float | None = None
        """Time from which on a forward could have included it. None: it was not ready yet."""
        self.why_empty: EmptyRoundReason | None = None
        """Reason why it verifies nothing. None: it does verify something, or its strategy wants nothing."""
        self.num_prompt_rows = 0
        """Rows with logits of its latest segment that serve only for prompt log-probabilities. They come first."""

    def restart(self, now: float) -> None:
        """Begins it again: the session has got room in the pool."""
        self.began_at, self.is_typical = now, False
        self.waiting_since = self.ready_since = None

    # When it begins.

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache."""
        return len(self._parts.generation.committed) - self._parts.cache.length

    @property
    def is_prefilling(self) -> bool:
        """True while more of the text is missing in the cache than one round can take."""
        return self.num_missing > MIN_PREFILL_ROWS

    @property
    def deadline(self) -> float:
        """Time at which waiting for a draft or a continuation ends."""
        return self.began_at + self.patience_ms / 1e3

    def answer(self, base_len: int) -> bool:
        """Takes in that a draft or a continuation follows so many committed tokens. Returns True for the first one
        that follows them all."""
        is_first = base_len == len(self._parts.generation.committed) and not self.is_answered
        self.is_answered = self.is_answered or is_first
        return is_first

    def is_ready(self, now: float) -> bool:
        """Chooses the nodes, and returns True if the round should begin with them."""
        if not self.is_prefilling:
            self._choose_nodes()
            # The datastore may have answered with nothing: there is then nothing more to wait for.
            is_complete = self.is_answered and not self._parts.drafter.is_drafting
            if not (is_complete or now >= self.deadline or self._is_worth_verifying()):
                self.waiting_since = now if self.waiting_since is None else self.waiting_since
                return False
        self.ready_since = now if self.ready_since is None else self.ready_since
        return True

    def _is_worth_verifying(self) -> bool:
        drafter, nodes = self._parts.drafter, self.nodes
        if not drafter.is_drafting or self.is_answered:
            return bool(nodes)
        if drafter.waiting.is_certain and nodes and nodes[0].source not in DRAFTED:
            return False  # draft, then verify: what was retrieved stands after the draft, not in its place
        return is_worth_verifying(self._parts.generation, nodes, self._parts.timings, drafter.accepted_per_chain)

    # What it verifies.

    def _choose_nodes(self) -> None:
        parts = self._parts
        self.nodes = next_nodes(parts.generation, parts.retrieval, self.strategy, parts.timings)

    def segment(self, max_prefill_rows: int, max_num_nodes: int) -> Segment:
        """Makes its rows: what is committed but not in the cache yet, then the nodes.

        Args:
            max_prefill_rows: Most rows of a prompt; a longer one comes in several pieces. Only the last piece has
                draws.
            max_num_nodes: Most nodes; the others are dropped.
        """
        cache, wants_prompt = self._parts.cache, self._parts.reports.wants_prompt
        # After a round this is the last committed token alone: `settle` keeps the slots of all before it.
        pending = list(self._parts.generation.committed[cache.length :])
        if self.is_prefilling and len(pending) > max_prefill_rows:
            # No verdict follows that would make a new round: the next piece is ready from the next plan on.
            self.ready_since = None
            self.num_prompt_rows = max_prefill_rows if wants_prompt else 0
            return Segment(cache, pending[:max_prefill_rows], num_logits=self.num_prompt_rows)
        if self.is_prefilling:
            self._choose_nodes()  # this is the last piece: `is_ready` has chosen none while there was more
        is_crowded_out = bool(self.nodes) and not max_num_nodes
        # Parents come before their children: what is left is still a chain or a sub-tree.
        self.nodes = self.nodes[:max_num_nodes]
        self.why_empty = self._why_empty(is_crowded_out=is_crowded_out)
        self.num_prompt_rows = len(pending) - 1 if wants_prompt else 0
        return Segment.of_tree(cache, pending, self.nodes, num_logits=self.num_prompt_rows + 1 + len(self.nodes))

    def _why_empty(self, *, is_crowded_out: bool) -> EmptyRoundReason | None:
        link, method = self._parts.drafter.state, self.strategy.method
        if self.nodes or self._parts.generation.max_chain_len < 1:
            return None
        if is_crowded_out:
            return EmptyRoundReason.LOAD
        # Checked before the strategy: without its drafter `auto` chooses a strategy without drafts, which would hide
        # the loss.
        if link is Link.LOST:
            return EmptyRoundReason.DRAFT_DOWN
        if self.strategy.is_plain or (method.has_draft_model and link is Link.ABSENT):
            return None
        if not method.has_draft_model:
            return EmptyRoundReason.NO_MATCH
        if link is Link.PENDING:
            return EmptyRoundReason.DRAFT_PENDING
        if self.is_answered:
            return EmptyRoundReason.NO_DRAFT
        return EmptyRoundReason.NOT_AWAITED if self.waiting_since is None else EmptyRoundReason.DRAFT_TIMEOUT

    # How it ends.

    def settle(
        self, draws: Sequence[TokenId], next_tokens: Sequence[Sequence[Follower]] = (), *, is_ahead: bool = False
    ) -> Verdict:
        """Commits what the target's draws decide; see `VerifySession.settle`."""
        generation, cache, drafter, retrieval, reports, _ = self._parts
        nodes = self.nodes
        if not nodes and self.waiting_since is not None and not self.is_answered:
            self._count_timeout()
        if retrieval is not None:
            retrieval.watch(nodes, draws, next_tokens)
        reports.watch(nodes)
        length = len(generation.committed)  # read before the verdict, which appends to them
        verdict = generation.apply(nodes, draws)
        # Committed tokens fill the slots below `length`; row 0 is the last of them, so row 1 lies at `length`.
        if not is_ahead:
            cache.keep(length, [length + row - 1 for row in verdict.accepted_rows])
        if generation.statistics.num_rounds == 1:
            # From now on other sessions find the prompt, while this one goes on after it.
            cache.publish(generation.committed)
        drafter.learn_verdict(nodes, verdict.num_accepted)
        if retrieval is not None:
            rejected_rows = () if verdict.rejected_row is None else (verdict.rejected_row,)
            judged = [nodes[row - 1] for row in (*verdict.accepted_rows, *rejected_rows)]
            retrieval.learn(judged, verdict, looks_up=self.strategy.retrieval)
        return verdict

    def _count_timeout(self) -> None:
        drafter, retrieval = self._parts.drafter, self._parts.retrieval
        if drafter.is_drafting:
            drafter.time_out()
        elif retrieval is not None:
            retrieval.time_out()

    def times(self, forward: Forward) -> RoundTime:
        """Returns where its time went. Called when it ends with the draws of a forward."""
        retrieval = self._parts.retrieval
        wait_ms = 0.0 if self.waiting_since is None else (forward.started - self.waiting_since) * 1e3
        retrieval_ms = 0.0 if retrieval is None else retrieval.spent_s * 1e3
        return RoundTime((forward.ended - self.began_at) * 1e3, forward.duration_ms, wait_ms, retrieval_ms)

    def next(self, strategy: Strategy, began_at: float, *, is_typical: bool) -> Round:
        """Makes the round after the commit. See the constructor for the arguments."""
        following = Round(self._parts, strategy, began_at, is_typical=is_typical)
        if self._parts.retrieval is not None:
            following._look_ahead(self._parts.retrieval)
        return following

    def _look_ahead(self, retrieval: SessionRetrieval) -> None:
        """Continues its commit with what is known in process, and decides what to ask the datastore."""
        generation = self._parts.generation
        retrieval.begin_round()
        # A strategy without retrieval looks nothing up and sends no questions.
        if generation.finish_reason is None and self.strategy.retrieval:
            # Read first: choosing the chain adds to the tree what is known in process.
            was_known = bool(generation.tree.root.children)
            next_chain(generation, retrieval, self.strategy)
            retrieval.ask(was_known=was_known)
