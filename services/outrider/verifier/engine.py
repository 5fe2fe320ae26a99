"""The verifier's engine: one thread that runs the rounds of all sessions, a packed forward at a time.

It never waits for the event loop: it takes what was posted to its inbox, asks every job whether its next round should
begin, and runs one forward for those that are ready. What a step decided goes to the loop in one call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from outrider.core.costs import ForwardTimes
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Statistics
from outrider.core.tree import Draft
from outrider.models.engine import EngineThread
from outrider.models.loading import LoadedModel
from outrider.models.ratio import Round, emitted
from outrider.models.sampling import Sampler
from outrider.verifier.measurements import EngineTimings, RoundCounts
from outrider.verifier.session import GenerationListener, PeerRequests, VerifySession

HOLD = 0.25
"""A round whose forward would leave out jobs that wait for a draft is held back for them this share of a forward: two
forwards one after the other cost more."""


class Engine(EngineThread[VerifySession, VerifySession]):
    """Runs rounds. Every public method but `stop` may be called from any thread and returns at once."""

    def __init__(
        self,
        model: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        *,
        forward_times: ForwardTimes,
        prefill_chunk: int = 256,
        max_rows: int = 256,
        max_num_rows: int = 32,
    ) -> None:
        """
        Args:
            model: The target.
            loop: Where sinks are called.
            forward_times: What a forward costs by its rows.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward; chains and sub-trees are cut to fit.
            max_num_rows: Most drafted rows of one session's sub-tree, where nobody has asked for a number.
        """
        super().__init__("verifier-engine", model.runner)
        self._sampler = Sampler()
        self._loop = loop
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self._pace = EngineTimings(forward_times, max_num_rows)
        self.start()

    def open(
        self, spec: SessionSpec, sink: GenerationListener, tiers: TierSource | None = None, *, has_drafter: bool = True
    ) -> None:
        """Begins a generation. `tiers` are copies of the datastore's; None = there is no datastore. `has_drafter`:
        whether drafts will come, if the method wants any."""
        self.begin(
            spec.session_id,
            partial(self._open, spec, sink, tiers, has_drafter),
            partial(self._loop.call_soon_threadsafe, sink.on_failure),
        )

    def attach(self, session_id: str) -> None:
        """A drafter's stream begins."""
        self.post(session_id, VerifySession.attach)

    def detach(self, session_id: str) -> None:
        """The drafter's stream has ended."""
        self.post(session_id, VerifySession.detach)

    def draft(self, session_id: str, draft: Draft) -> None:
        """New nodes. For a session that has ended: nothing."""
        self.post(session_id, lambda job: job.add_draft(draft, time.perf_counter()))

    def call_back(self, session_id: str, taken_in: Callable[[], None]) -> None:
        """Calls on the loop once all that was posted for the session before is taken in. If it has ended: never."""

        def tell(_: VerifySession) -> None:
            self._loop.call_soon_threadsafe(taken_in)

        self.post(session_id, tell)

    def continuation(self, session_id: str, base_len: int, continuation: Continuation) -> None:
        """What the datastore found for the tokens before base_len, possibly nothing."""

        def add(job: VerifySession) -> None:
            job.add_continuation(base_len, continuation, time.perf_counter())
            question = job.take_question()
            if question is not None:
                self._loop.call_soon_threadsafe(job.sink.on_question, question)

        self.post(session_id, add)

    def lose_datastore(self, session_id: str) -> None:
        """The datastore does not answer."""
        self.post(session_id, VerifySession.lose_datastore)

    def pause(self, session_id: str, is_paused: bool) -> None:
        """Stops or resumes a generation whose reader is slow."""

        def set_paused(job: VerifySession) -> None:
            job.is_paused = is_paused

        self.post(session_id, set_paused)

    @property
    def counts(self) -> RoundCounts:
        """What was counted since the start."""
        return self._pace.counts

    @property
    def kv_cache_use(self) -> tuple[int, int]:
        """Of all sessions: slots with a token's keys and values, and the memory held for them in bytes."""
        caches = [job.cache for job in list(self.sessions.values())]
        return sum(cache.length for cache in caches), sum(cache.num_bytes for cache in caches)

    def _open(
        self, spec: SessionSpec, sink: GenerationListener, tiers: TierSource | None, has_drafter: bool
    ) -> VerifySession:
        cache = self._runner.new_cache(len(spec.prompt_token_ids) + spec.max_tokens)
        return VerifySession(spec, sink, cache, self._pace, tiers, time.perf_counter(), has_drafter=has_drafter)

    def plan(self, now: float) -> tuple[list[VerifySession], float | None]:
        """The jobs whose round begins now; if none, how long to wait (None = until something is posted)."""
        self._pace.set_num_sessions(len(self.sessions))
        ready: list[VerifySession] = []
        waiting: list[VerifySession] = []
        for job in self.sessions.values():
            if not job.is_paused:
                (ready if job.is_ready(now) else waiting).append(job)
        if not waiting:
            return ready, None
        until = min(job.deadline for job in waiting)
        if ready:
            held_since = min(job.ready_since or now for job in ready)
            until = min(until, held_since + HOLD * self._pace.forward_ms.get(0.0) / 1e3)
            if until <= now:
                return ready, None
        return [], max(0.0, until - now)

    def step(self, work: list[VerifySession]) -> None:
        """One forward, one draw for each row, one verdict for each job that is past its prompt."""
        started = time.perf_counter()
        prefill_rows, max_num_nodes = self._prefill_chunk, max(0, self._max_rows // len(work) - 1)
        segments = []
        for job in work:
            segment = job.segment(max(1, prefill_rows), max_num_nodes)
            prefill_rows -= len(segment.token_ids) - segment.num_logits
            segments.append(segment)
        packed = time.perf_counter()
        logits = self._runner.forward(segments)
        forward_ms = (time.perf_counter() - packed) * 1e3
        drawing = [job for job, segment in zip(work, segments, strict=True) if segment.num_logits]
        draws = emitted(self._sampler, logits, [_round(job) for job in drawing])
        # What was drafted meanwhile: a verdict should find it, and what follows from it should know it.
        self.take_posted(0.0)
        now = time.perf_counter()
        num_rows = sum(len(segment.token_ids) for segment in segments)
        if drawing:
            self.counts.forwards.add(forward_ms / 1e3)
            self.counts.num_rows += num_rows
        if len(drawing) == len(work) and num_rows < 2 * self._max_rows:
            self._pace.forward_ms.add(forward_ms)
            self._pace.forward_times.observe(num_rows, forward_ms)
        verdicts = []
        for job, tokens in zip(drawing, draws, strict=True):
            verdict = job.apply(tokens, forward_ms, started, now)
            verdicts.append((job.sink, verdict, job.session.statistics, job.wishes()))
            if verdict.finish_reason is not None:
                self.remove(job.session.spec.session_id)
        if verdicts:
            self._loop.call_soon_threadsafe(_deliver, verdicts)


def _round(job: VerifySession) -> Round:
    session = job.session
    first = session.num_output_tokens
    offset = first - len(session.committed)
    indices = [first, *(node.position + 1 + offset for node in job.nodes)]
    return Round(session.spec.sampling, indices, job.nodes if session.decides_by_ratio else None)


def _deliver(verdicts: list[tuple[GenerationListener, Verdict, Statistics, PeerRequests]]) -> None:
    for sink, verdict, statistics, wishes in verdicts:
        sink.on_verdict(verdict, statistics, wishes)
