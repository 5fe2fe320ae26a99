"""One generation in the engine: its session, its keys and values, and what it is waiting for. Owned by the engine's
thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from outrider.core.calibration import Calibration
from outrider.core.ngrams import Continuation
from outrider.core.params import Method, Source
from outrider.core.patience import DraftPace, patience_ms
from outrider.core.retrieval import MIN_MATCH_LEN, Retriever, TierSource
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.statistics import RoundTime, RunningMean, Statistics
from outrider.core.tree import Draft, DraftCost, Node, StreamNodes, TokenId, expected_num_accepted
from outrider.models.runner import KVCache, Segment


class GenerationSink(Protocol):
    """Where a generation's events go. Called on the event loop."""

    def on_verdict(self, verdict: Verdict, statistics: Statistics, *, wants_lookup: bool) -> None:
        """A round is over. The last verdict has a finish reason; only then may the statistics be read. `wants_lookup`:
        nothing that is known here continues the committed tokens, the datastore may know more."""

    def on_failure(self) -> None:
        """The engine could not go on; its log says why."""


class Pace:
    """What the engine has measured of its peers, over all sessions. Milliseconds."""

    def __init__(self, forward_ms: float) -> None:
        self.forward_ms = RunningMean()
        self.forward_ms.add(forward_ms)
        self.speculator_ms = RunningMean()
        """From a commit to the speculator's first answer."""
        self.datastore_ms = RunningMean()
        """From a commit to the datastore's answer."""
        self.retrieval = Calibration()


class Job:
    """A generation on its way."""

    def __init__(
        self,
        spec: SessionSpec,
        sink: GenerationSink,
        cache: KVCache,
        pace: Pace,
        tiers: TierSource | None,
        now: float,
    ) -> None:
        """`tiers` are copies of the datastore's; None = there is no datastore."""
        self.session = Session(spec)
        self.sink = sink
        self.is_paused = False
        self._cache = cache
        self._pace = pace
        self._stream_nodes = StreamNodes(self.session.tree)
        self._is_attached = spec.speculation.method.has_draft_model
        self._retrieves = spec.speculation.retrieves
        self._retriever: Retriever | None = None
        self._retrieval_s = 0.0
        self._barren: Node | None = None
        """The end of a chain behind which nothing was found."""
        self._match_len = 0
        self._has_datastore = tiers is not None
        self.wants_lookup = self._has_datastore
        self._num_lookup_timeouts = 0
        self._accepted_per_chain = RunningMean(0.1)
        """Of the chains that may be waited for."""
        self._num_timeouts = 0
        self._committed_at = now
        self._waiting_since: float | None = None
        self._is_answered = False
        self.ready_since: float | None = None
        self.chain: list[Node] = []
        if self._retrieves:
            num_prompt_tokens = len(spec.prompt_token_ids)
            self._retriever = Retriever(self.session.committed, num_prompt_tokens, spec.sampling, pace.retrieval, tiers)
        self._patience_ms = self._patience()

    # What comes in.

    def attach(self) -> None:
        """A drafter's stream begins: its node ids start anew."""
        self._stream_nodes = StreamNodes(self.session.tree)
        self._is_attached = True
        self._num_timeouts = 0

    def detach(self) -> None:
        """The drafter is gone."""
        self._is_attached = False
        self.session.statistics.num_speculator_losses += 1
        self.session.statistics.degraded = True

    def add_draft(self, draft: Draft, cost: DraftCost, now: float) -> None:
        """New nodes from the drafter."""
        self._stream_nodes.add(draft)
        self._num_timeouts = 0
        if self._answers(draft.base_len):
            latency_ms = (now - self._committed_at) * 1e3
            statistics = self.session.statistics
            if statistics.num_rounds:  # the first answer includes the drafter's prefill
                self._pace.speculator_ms.add(latency_ms)
                statistics.draft_latencies_ms.append(latency_ms)
                statistics.draft_forwards_ms.append(cost.forward_us / 1e3)
                statistics.draft_retrievals_ms.append(cost.retrieval_us / 1e3)

    def add_continuation(self, base_len: int, continuation: Continuation, now: float) -> None:
        """What the datastore found for the tokens before base_len, possibly nothing."""
        self._num_lookup_timeouts = 0
        anchor = self.session.tree.anchor(base_len)
        if self._retriever is not None and anchor is not None:
            guess = self._retriever.from_datastore(continuation, base_len)
            if guess is not None:
                self._retriever.plant(self.session.tree, anchor, guess)
        if self._answers(base_len) and self.session.statistics.num_rounds:
            self._pace.datastore_ms.add((now - self._committed_at) * 1e3)

    def _answers(self, base_len: int) -> bool:
        """Whether this is the first answer to the latest commit."""
        is_first = base_len == len(self.session.committed) and not self._is_answered
        self._is_answered = self._is_answered or is_first
        return is_first

    def lose_datastore(self) -> None:
        """The datastore does not answer; what is known here remains."""
        self.session.statistics.degraded = True
        self.wants_lookup = False
        self._patience_ms = self._patience()

    # Whether to go on.

    def is_ready(self, now: float) -> bool:
        """Whether the next round should begin. Builds the chain on the way."""
        if self.is_prefilling:
            return True
        self.chain = self._next_chain()
        is_ready = self._is_worth_verifying(self.chain) or now >= self.deadline
        is_ready = is_ready or (self._is_answered and not self._may_grow)
        if is_ready:
            self.ready_since = self.ready_since or now
        elif self._waiting_since is None:
            self._waiting_since = now
        return is_ready

    def _is_worth_verifying(self, chain: Sequence[Node]) -> bool:
        """Whether a chain need not be waited for. One that was retrieved may bring fewer tokens in its time than the
        draft model's, which comes a little later, in a little more."""
        if not chain or not self._is_attached or chain[0].source is Source.DRAFT:
            return bool(chain)
        forward_ms = self._pace.forward_ms.get(0.0)
        waited_ms = forward_ms + self._pace.speculator_ms.get(0.2 * forward_ms)
        drafted = 1 + self._accepted_per_chain.get(1.0)
        return (1 + expected_num_accepted(chain)) * waited_ms >= drafted * forward_ms

    @property
    def is_prefilling(self) -> bool:
        """Whether more of the prompt is missing than goes into a round."""
        return len(self.session.committed) - self._cache.length > 64

    @property
    def deadline(self) -> float:
        """When waiting for a draft ends."""
        return self._committed_at + self._patience_ms / 1e3

    @property
    def _may_grow(self) -> bool:
        """Whether an answer that brought nothing may be followed by one that does."""
        return self._is_attached

    def _patience(self) -> float:
        method = self.session.spec.speculation.method
        if self.session.num_wanted <= 1:
            return 0.0
        if self._is_attached:
            latency_ms, timeouts = self._pace.speculator_ms.value, self._num_timeouts
        elif self._retrieves and self.wants_lookup:
            method, latency_ms = Method.RETRIEVAL, self._pace.datastore_ms.value
            timeouts = self._num_lookup_timeouts
        else:
            return 0.0
        forward_ms = self._pace.forward_ms.get(0.0)
        return patience_ms(method, DraftPace(latency_ms, forward_ms, self._accepted_per_chain.get(1.0), timeouts))

    def _next_chain(self) -> list[Node]:
        """The mirror's chain, and what is retrieved in process behind it."""
        chain = self.session.next_chain()
        missing = self.session.max_chain_len - len(chain)
        tip = chain[-1] if chain else self.session.tree.root
        if self._retriever is None or missing <= 0 or tip.children or tip is self._barren:
            return chain
        started = time.perf_counter()
        behind = [node.token_id for node in chain]
        self._match_len = self._retriever.grow(self.session.tree, tip, behind, missing)
        self._barren = None if tip.children else tip
        self._retrieval_s += time.perf_counter() - started
        return self.session.next_chain()

    # The round.

    def segment(self, max_prefill_rows: int, max_chain_len: int) -> Segment:
        """The rows of this round: what is committed but not in the cache yet, then the chain. A long prompt comes in
        pieces."""
        pending = list(self.session.committed[self._cache.length :])
        if self.is_prefilling and len(pending) > max_prefill_rows:
            return Segment(self._cache, pending[:max_prefill_rows], num_logits=0)
        if self.is_prefilling:
            self.chain = self._next_chain()
        self.chain = self.chain[:max_chain_len]
        return Segment(self._cache, [*pending, *(node.token_id for node in self.chain)], 1 + len(self.chain))

    def apply(self, draws: Sequence[TokenId], forward_ms: float, started: float, now: float) -> Verdict:
        """Takes the target's draws in; commits; decides how long the next chain may be waited for."""
        session, chain = self.session, self.chain
        wait_ms = 0.0 if self._waiting_since is None else (started - self._waiting_since) * 1e3
        if not chain and self._waiting_since is not None and not self._is_answered:
            self._num_timeouts += self._is_attached
            self._num_lookup_timeouts += not self._is_attached
        length = len(session.committed)
        verdict = session.apply(chain, draws)
        self._cache.truncate(length + verdict.num_accepted)
        if chain and (chain[0].source is Source.DRAFT or not self._is_attached):
            self._accepted_per_chain.add(verdict.num_accepted)
        self._learn(verdict)
        times = RoundTime((now - self._committed_at) * 1e3, forward_ms, wait_ms, self._retrieval_s * 1e3)
        session.statistics.round_times.append(times)
        self._begin_round(now)
        return verdict

    def _begin_round(self, now: float) -> None:
        """A round is over, the next one begins: what is known here continues the commit at once."""
        self._retrieval_s, self.chain, self._barren, self._match_len = 0.0, [], None, 0
        self._committed_at, self._waiting_since, self.ready_since, self._is_answered = now, None, None, False
        if self._has_datastore and self.session.finish_reason is None:
            is_known = bool(self.session.tree.root.children)
            self._next_chain()
            self.wants_lookup = not is_known and self._match_len < MIN_MATCH_LEN
        self._patience_ms = self._patience()

    def _learn(self, verdict: Verdict) -> None:
        if self._retriever is None:
            return
        started = time.perf_counter()
        self._retriever.judge(self.chain, verdict.num_accepted)
        self._retriever.commit(verdict.token_ids, verdict.rejected_token_id)
        self._retrieval_s += time.perf_counter() - started
