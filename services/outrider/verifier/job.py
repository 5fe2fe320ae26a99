"""One generation in the engine: its session, its keys and values, and what it is waiting for. Owned by the engine's
thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from outrider.core.ngrams import OwnText
from outrider.core.params import Method, Source
from outrider.core.patience import DraftPace, patience_ms
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.statistics import RoundTime, RunningMean, Statistics
from outrider.core.tree import Draft, Node, StreamNodes, TokenId
from outrider.models.runner import KVCache, Segment

OWN_TEXT_CONTEXT = 8
"""Last tokens that the own text is asked about; its index matches no more."""


class GenerationSink(Protocol):
    """Where a generation's events go. Called on the event loop."""

    def on_verdict(self, verdict: Verdict, statistics: Statistics) -> None:
        """A round is over. The last verdict has a finish reason; only then may the statistics be read."""

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


class Job:
    """A generation on its way."""

    def __init__(self, spec: SessionSpec, sink: GenerationSink, cache: KVCache, pace: Pace, now: float) -> None:
        self.session = Session(spec)
        self.sink = sink
        self.is_paused = False
        self._cache = cache
        self._pace = pace
        self._stream_nodes = StreamNodes(self.session.tree)
        self._is_attached = spec.speculation.method.has_draft_model
        self._retrieves = spec.speculation.retrieves
        self._own_text = OwnText()
        self._own_text_rate = RunningMean(0.1)
        self._accepted_per_chain = RunningMean(0.1)
        self._num_timeouts = 0
        self._committed_at = now
        self._waiting_since: float | None = None
        self._is_answered = False
        self.ready_since: float | None = None
        self.chain: list[Node] = []
        if self._retrieves:
            self._own_text.append(self.session.committed)
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

    def add_draft(self, draft: Draft, forward_us: int, now: float) -> None:
        """New nodes from the drafter."""
        self._stream_nodes.add(draft)
        self._num_timeouts = 0
        if self._answers(draft.base_len):
            latency_ms = (now - self._committed_at) * 1e3
            statistics = self.session.statistics
            if statistics.num_rounds:  # the first answer includes the drafter's prefill
                self._pace.speculator_ms.add(latency_ms)
                statistics.draft_latencies_ms.append(latency_ms)
                statistics.draft_forwards_ms.append(forward_us / 1e3)

    def add_continuation(self, draft: Draft, now: float) -> None:
        """What the datastore found, possibly nothing."""
        StreamNodes(self.session.tree).add(draft)
        if self._answers(draft.base_len) and self.session.statistics.num_rounds:
            self._pace.datastore_ms.add((now - self._committed_at) * 1e3)

    def _answers(self, base_len: int) -> bool:
        """Whether this is the first answer to the latest commit."""
        is_first = base_len == len(self.session.committed) and not self._is_answered
        self._is_answered = self._is_answered or is_first
        return is_first

    def lose_datastore(self) -> None:
        """The datastore is gone; the own text remains."""
        self.session.statistics.degraded = True

    # Whether to go on.

    def is_ready(self, now: float) -> bool:
        """Whether the next round should begin. Builds the chain on the way."""
        if self.is_prefilling:
            return True
        self.chain = self._next_chain()
        is_ready = bool(self.chain) or now >= self.deadline or (self._is_answered and not self._may_grow)
        if is_ready:
            self.ready_since = self.ready_since or now
        elif self._waiting_since is None:
            self._waiting_since = now
        return is_ready

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
        elif self._retrieves:
            method, latency_ms, timeouts = Method.RETRIEVAL, self._pace.datastore_ms.value, 0
        else:
            return 0.0
        forward_ms = self._pace.forward_ms.get(0.0)
        return patience_ms(method, DraftPace(latency_ms, forward_ms, self._accepted_per_chain.get(1.0), timeouts))

    def _next_chain(self) -> list[Node]:
        """The mirror's chain, and what the session's own text knows behind it."""
        chain = self.session.next_chain()
        missing = self.session.max_chain_len - len(chain)
        tip = chain[-1] if chain else self.session.tree.root
        if not self._retrieves or missing <= 0 or tip.children:
            return chain
        context = [*self.session.committed[-OWN_TEXT_CONTEXT:], *(node.token_id for node in chain)]
        logprob = self._own_text_logprob
        for token_id in self._own_text.continuation(context, missing):
            child = self.session.tree.add(tip, token_id, logprob, Source.OWN_TEXT)
            if child is None:
                break
            tip = child
        return self.session.next_chain()

    @property
    def _own_text_logprob(self) -> float:
        return math.log(min(0.95, max(0.05, self._own_text_rate.get(0.7))))

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
        if not chain and self._waiting_since is not None and self._is_attached and not self._is_answered:
            self._num_timeouts += 1
        length = len(session.committed)
        verdict = session.apply(chain, draws)
        self._cache.truncate(length + verdict.num_accepted)
        if chain:
            self._accepted_per_chain.add(verdict.num_accepted)
        for node, index in zip(chain, range(verdict.num_accepted + 1), strict=False):
            if node.source is Source.OWN_TEXT:
                self._own_text_rate.add(float(index < verdict.num_accepted))
        if self._retrieves:
            self._own_text.append(verdict.token_ids)
        session.statistics.round_times.append(RoundTime((now - self._committed_at) * 1e3, forward_ms, wait_ms))
        self.chain = []
        self._committed_at, self._waiting_since, self.ready_since, self._is_answered = now, None, None, False
        self._patience_ms = self._patience()
        return verdict
