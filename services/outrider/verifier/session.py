"""One generation in the engine: its session, its keys and values, and what it is waiting for. Owned by the engine's
thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.auto.controller import Controller
from outrider.core.auto.history import StrategyHistory
from outrider.core.auto.strategies import Decision, params_of, strategies_of
from outrider.core.costs import DraftTimings, Waiting, patience_ms, waiting_of
from outrider.core.params import Method, Source, SpeculationParams, Steering
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import target_plan
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.statistics import DraftTime, RoundTime, RunningMean, Statistics
from outrider.core.tree import Draft, Node, StreamNodes, TokenId
from outrider.models.runner import KVCache, Segment
from outrider.verifier.measurements import EmptyRoundReason, EngineTimings
from outrider.verifier.retrieval import Question, SessionRetrieval
from outrider.verifier.round import is_worth_verifying, segment_of, select, why_nothing


@dataclass(frozen=True, slots=True)
class PeerRequests:
    """What a generation wants of its peers after a round."""

    question: Question | None = None
    """For the datastore."""
    steering: Steering | None = None
    """For the speculator."""


class GenerationListener(Protocol):
    """Where a generation's events go. Called on the event loop."""

    def on_verdict(self, verdict: Verdict, statistics: Statistics, wishes: PeerRequests) -> None:
        """A round is over. The last verdict has a finish reason; only then may the statistics be read."""

    def on_question(self, question: Question) -> None:
        """The datastore's last answer raises another question."""

    def on_failure(self) -> None:
        """The engine could not go on; its log says why."""


class VerifySession:
    """A generation on its way."""

    def __init__(
        self,
        spec: SessionSpec,
        sink: GenerationListener,
        cache: KVCache,
        pace: EngineTimings,
        tiers: TierSource | None,
        now: float,
        *,
        has_drafter: bool = True,
    ) -> None:
        """`tiers` are copies of the datastore's; None = there is no datastore. `has_drafter`: whether drafts will come,
        if the method wants any."""
        self.session = Session(spec, pace.counts)
        self.sink = sink
        self.is_paused = False
        self.cache = cache
        self._pace = pace
        self._stream_nodes = StreamNodes(self.session.tree)
        self._pilot = Pilot(spec.speculation, spec.sampling.temperature, pace.experience, pace.number_session())
        self._has_drafter = has_drafter and spec.speculation.method.has_draft_model
        self._is_attached = self._has_drafter
        self._pilot.set_attached(self._is_attached)
        plan = target_plan(spec.speculation)
        self._continuations = None if plan is None else SessionRetrieval(self.session, plan, pace, tiers)
        self._accepted_per_chain = RunningMean(0.1)
        """Of the chains that may be waited for."""
        self._num_timeouts = 0
        self._committed_at = now
        self._waiting_since: float | None = None
        self._is_answered = False
        self._misses: dict[int, float] = {}
        """When those commits were made that left nothing to verify and that no draft has answered, by base_len."""
        self._has_drafted = False
        self._fallback: EmptyRoundReason | None = None
        """Why this round verifies nothing; None = it does, or nothing was wanted."""
        self.ready_since: float | None = None
        self.nodes: list[Node] = []
        """What the next round verifies: a chain, or a sub-tree, the most probable path first."""
        self._patience_ms = self._patience()

    # What comes in.

    def attach(self) -> None:
        """A drafter's stream begins: its node ids start anew."""
        self._stream_nodes = StreamNodes(self.session.tree)
        self._is_attached = True
        self._pilot.set_attached(True)
        self._num_timeouts = 0
        self._has_drafted = False
        self._misses.clear()

    def detach(self) -> None:
        """The drafter is gone."""
        self._is_attached = False
        self._pilot.set_attached(False)
        self.session.statistics.add(num_speculator_losses=1)
        self.session.statistics.degraded = True

    def add_draft(self, draft: Draft, now: float) -> None:
        """New nodes from the drafter."""
        self._stream_nodes.add(draft)
        self._num_timeouts = 0
        self._answers(draft.base_len)
        missed_at = self._misses.pop(draft.base_len, None)
        self._misses = {base_len: at for base_len, at in self._misses.items() if base_len > draft.base_len}
        # The first answer includes the drafter's prefill; one to a hit takes its time.
        if missed_at is not None and self._has_drafted:
            latency_ms = (now - missed_at) * 1e3
            self._pace.speculator_ms.add(latency_ms)
            self._pace.draft_forward_ms.add(draft.forward_us / 1e3)
            self._pace.counts.draft_latencies.add(latency_ms / 1e3)
            times = DraftTime(latency_ms, draft.forward_us / 1e3, draft.retrieval_us / 1e3)
            self.session.statistics.draft_times.append(times)
        self._has_drafted = True

    def add_continuation(self, base_len: int, continuation: Continuation, now: float) -> None:
        """What the datastore found for the tokens before base_len, possibly nothing."""
        is_awaited = self._continuations is not None and self._continuations.add(base_len, continuation)
        if self._answers(base_len) and is_awaited and self.session.statistics.num_rounds:
            self._pace.datastore_ms.add((now - self._committed_at) * 1e3)

    def _answers(self, base_len: int) -> bool:
        """Whether this is the first answer to the latest commit."""
        is_first = base_len == len(self.session.committed) and not self._is_answered
        self._is_answered = self._is_answered or is_first
        return is_first

    def lose_datastore(self) -> None:
        """The datastore does not answer; what is known here remains."""
        self.session.statistics.degraded = True
        if self._continuations is not None:
            self._continuations.lose()
        self._patience_ms = self._patience()

    # Whether to go on.

    def is_ready(self, now: float) -> bool:
        """Whether the next round should begin. Builds the chain on the way."""
        if self.is_prefilling:
            return True
        self.nodes = self._next_nodes()
        is_ready = self._is_worth_verifying(self.nodes) or now >= self.deadline
        is_ready = is_ready or (self._is_answered and not self._is_drafting)
        if is_ready:
            self.ready_since = self.ready_since or now
        elif self._waiting_since is None:
            self._waiting_since = now
        return is_ready

    def _is_worth_verifying(self, nodes: Sequence[Node]) -> bool:
        if not self._is_drafting or self._is_answered:
            return bool(nodes)
        if self._waiting is Waiting.ALWAYS and nodes and nodes[0].source is not Source.DRAFT:
            return False  # draft, then verify: what was retrieved stands behind the draft, not in its place
        return is_worth_verifying(self.session, nodes, self._pace, self._accepted_per_chain.get(1.0))

    @property
    def _waiting(self) -> Waiting:
        return waiting_of(self._pilot.way.method, self.session.spec.speculation)

    @property
    def _is_drafting(self) -> bool:
        """Whether drafts are on their way, and wanted."""
        return self._is_attached and self._pilot.way.method.has_draft_model

    @property
    def is_prefilling(self) -> bool:
        """Whether more of the prompt is missing than goes into a round."""
        return len(self.session.committed) - self.cache.length > 64

    @property
    def deadline(self) -> float:
        """When waiting for a draft ends."""
        return self._committed_at + self._patience_ms / 1e3

    def _patience(self) -> float:
        if self.session.num_wanted <= 1:
            return 0.0
        if not self._is_drafting:
            continuations = self._continuations if self._pilot.way.retrieval else None
            return 0.0 if continuations is None else continuations.patience_ms()
        latency_ms, forward_ms = self._pace.speculator_ms.value, self._pace.forward_ms.get(0.0)
        accepted = self._accepted_per_chain.get(1.0)
        return patience_ms(self._waiting, DraftTimings(latency_ms, forward_ms, accepted, self._num_timeouts))

    def _next_nodes(self) -> list[Node]:
        """What the next round should verify."""
        way = self._pilot.way
        return [] if way.is_plain else select(self.session, self._next_chain(), way.rows, self._pace)

    def _next_chain(self) -> list[Node]:
        """The mirror's chain, and what is retrieved in process behind it."""
        chain = self.session.next_chain()
        if self._continuations is None or not self._pilot.way.retrieval:
            return chain
        missing = self.session.max_chain_len - len(chain)
        return self.session.next_chain() if self._continuations.extend(chain, missing) else chain

    # The round.

    def segment(self, max_prefill_rows: int, max_num_nodes: int) -> Segment:
        """The rows of this round: what is committed but not in the cache yet, then the nodes. A long prompt comes in
        pieces."""
        pending = list(self.session.committed[self.cache.length :])
        if self.is_prefilling and len(pending) > max_prefill_rows:
            return Segment(self.cache, pending[:max_prefill_rows], num_logits=0)
        if self.is_prefilling:
            self.nodes = self._next_nodes()
        is_crowded_out = bool(self.nodes) and not max_num_nodes
        self.nodes = self.nodes[:max_num_nodes]
        self._fallback = self._why_nothing(is_crowded_out=is_crowded_out)
        return segment_of(self.cache, pending, self.nodes)

    def apply(self, draws: Sequence[TokenId], forward_ms: float, started: float, now: float) -> Verdict:
        """Takes the target's draws in; commits; decides how long the next chain may be waited for."""
        session, nodes = self.session, self.nodes
        wait_ms = 0.0 if self._waiting_since is None else (started - self._waiting_since) * 1e3
        if not nodes and self._waiting_since is not None and not self._is_answered:
            if self._is_drafting:
                self._num_timeouts += 1
            elif self._continuations is not None:
                self._continuations.time_out()
        length = len(session.committed)
        verdict = session.apply(nodes, draws)
        self.cache.keep(length, [length + row - 1 for row in verdict.accepted_rows])
        if nodes and (nodes[0].source is Source.DRAFT or not self._is_drafting):
            self._accepted_per_chain.add(verdict.num_accepted)
        self._learn(verdict)
        spent_s = 0.0 if self._continuations is None else self._continuations.spent_s
        times = RoundTime((now - self._committed_at) * 1e3, forward_ms, wait_ms, spent_s * 1e3)
        is_typical = session.statistics.num_rounds > 1  # the first one has the prompt in it
        if is_typical:
            self._pace.overhead_ms.add(times.overhead_ms)
        session.statistics.round_times.append(times)
        self._pace.counts.add_round(session.spec, self._pilot.way.method, verdict, self._fallback)
        self._pace.counts.add_times(times, is_first=not is_typical, has_waited=self._waiting_since is not None)
        self._pilot.observe(len(verdict.token_ids), times.round_ms, is_typical=is_typical)
        if verdict.finish_reason is not None:
            session.statistics.decisions = self._pilot.decisions
        self._begin_round(now)
        return verdict

    def _why_nothing(self, *, is_crowded_out: bool) -> EmptyRoundReason | None:
        if self.nodes or self.session.max_chain_len < 1:
            return None
        if is_crowded_out:
            return EmptyRoundReason.LOAD
        return why_nothing(
            self._pilot.way,
            has_drafter=self._has_drafter,
            is_attached=self._is_attached,
            has_drafted=self._has_drafted,
            is_answered=self._is_answered,
            was_awaited=self._waiting_since is not None,
        )

    def _begin_round(self, now: float) -> None:
        """A round is over, the next one begins: what is known here continues the commit at once."""
        self.nodes = []
        self._committed_at, self._waiting_since, self.ready_since, self._is_answered = now, None, None, False
        if self._continuations is not None:
            self._continuations.begin_round()
            if self.session.finish_reason is None:
                was_known = bool(self.session.tree.root.children)
                self._next_chain()
                self._continuations.ask(was_known=was_known)
        if self._is_drafting and not self.session.tree.root.children:
            self._misses[len(self.session.committed)] = now
        self._patience_ms = self._patience()

    def wishes(self) -> PeerRequests:
        """What it wants of its peers now."""
        return PeerRequests(
            question=self.take_question(),
            steering=self._pilot.steering(self._pace) if self._is_attached else None,
        )

    def take_question(self) -> Question | None:
        """What to ask the datastore now; None = nothing."""
        continuations = self._continuations if self._pilot.way.retrieval else None
        return None if continuations is None else continuations.take_question()

    def _learn(self, verdict: Verdict) -> None:
        if self._continuations is None:
            return
        judged = [*verdict.accepted_rows, *([verdict.rejected_row] if verdict.rejected_row is not None else [])]
        self._continuations.learn([self.nodes[row - 1] for row in judged], verdict)


class Pilot:
    """Of one generation. `Method.AUTO` changes its way between rounds; all other methods have one."""

    def __init__(self, params: SpeculationParams, temperature: float, experience: StrategyHistory, number: int) -> None:
        """`number` is that of the session: sessions try other ways at different places of their texts."""
        self._params = params
        self._ways = strategies_of(params)
        self._controller: Controller | None = None
        if params.method is Method.AUTO:
            self._controller = Controller(experience, temperature, self._ways, number)
        self.way = self._ways[0]
        self._told_way = self.way
        self._told = Steering()

    def set_attached(self, is_attached: bool) -> None:
        """Whether a drafter is there."""
        if self._controller is not None:
            self._controller.set_available([way for way in self._ways if is_attached or not way.method.has_draft_model])
            self.way = self._controller.strategy()

    def observe(self, num_tokens: int, round_ms: float, *, is_typical: bool) -> None:
        """A round is over; the next one goes the way that `way` says. A round with a prompt in it is not typical."""
        if self._controller is not None:
            if is_typical:
                self._controller.observe(num_tokens, round_ms)
            self.way = self._controller.strategy()

    @property
    def decisions(self) -> list[Decision]:
        """What `Method.AUTO` has used; nothing for any other method."""
        return self._controller.decisions() if self._controller is not None else []

    def steering(self, pace: EngineTimings) -> Steering | None:
        """What the speculator should know, if it is news."""
        latency_ms, told = pace.speculator_ms.value, self._told
        forward_us, round_trip_us = told.forward_us, told.round_trip_us
        if latency_ms is not None:
            forward_us = int(pace.forward_ms.get(0.0) * 1e3)
            round_trip_us = max(1, int((latency_ms - pace.draft_forward_ms.get(0.0)) * 1e3))
        is_known = _is_near(told.forward_us, forward_us) and _is_near(told.round_trip_us, round_trip_us)
        if is_known and self._told_way == self.way:
            return None
        speculation = None if self._told_way == self.way else params_of(self.way, self._params)
        self._told, self._told_way = Steering(speculation, forward_us, round_trip_us), self.way
        return self._told


def _is_near(known_us: int, measured_us: int) -> bool:
    """Whether a drafter that knows the one would do the same with the other."""
    return abs(known_us - measured_us) <= max(500, known_us // 3)
