"""The verifier's engine: one thread that runs the rounds of all sessions, a packed forward at a time.

It never waits for the event loop: it takes what was posted to its inbox, asks every session whether its next round
should begin, and runs one forward for those that are ready. What a step decided goes to the loop in one call.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from outrider.core.costs import ForwardTimes
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Statistics
from outrider.models.engine import EngineThread
from outrider.models.loading import LoadedModel
from outrider.models.packing import Segment
from outrider.models.ratio import Round, emitted
from outrider.models.sampling import Sampler
from outrider.models.timing import Stopwatch, stopwatch_for
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import GenerationListener, PeerRequests, VerifySession
from outrider.verifier.timings import EngineTimings

HOLD_SHARE = 0.25
"""Share of a forward for which a round that would leave out waiting sessions is held back for them: two forwards one
after the other cost more, as each reads all weights."""


class Engine(EngineThread[VerifySession, VerifySession]):
    """Runs the rounds of all sessions. `open` and the properties may be used in any thread."""

    def __init__(
        self,
        model: LoadedModel,
        loop: asyncio.AbstractEventLoop,
        *,
        forward_times: ForwardTimes,
        prefill_chunk: int = 256,
        max_rows: int = 256,
        max_num_rows: int = 32,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """
        Args:
            model: The target.
            loop: Event loop on which listeners are called.
            forward_times: Times of a forward by its rows.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward; chains and sub-trees are cut to fit.
            max_num_rows: Most drafted rows of one session's sub-tree, where its request names no number.
            stopwatch: Times the forwards. None means the one for the target's device.
        """
        super().__init__("verifier-engine", model.runner)
        self.counts = RoundCounts()
        self._timings = EngineTimings(forward_times, max_num_rows)
        self._sampler = Sampler()
        self._stopwatch = stopwatch or stopwatch_for(model.runner.device)
        self._loop = loop
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self.start()  # last: the thread reads all of the above

    def open(
        self,
        spec: SessionSpec,
        listener: GenerationListener,
        tiers: TierSource | None = None,
        *,
        has_drafter: bool = True,
    ) -> None:
        """Begins a generation.

        Args:
            spec: The request.
            listener: Receives the verdicts.
            tiers: Copies of the datastore's tiers. None means that there is no datastore.
            has_drafter: True if drafts will come, should the method want any.
        """

        def open_session() -> VerifySession:
            # Room for the whole text: a cache that grows is copied.
            cache = self._runner.new_cache(len(spec.prompt_token_ids) + spec.max_tokens)
            now = time.perf_counter()
            session = VerifySession(
                spec, listener, cache, self._timings, self.counts, tiers, now, has_drafter=has_drafter
            )
            if (opening := session.opening()) is not None:
                self._loop.call_soon_threadsafe(listener.on_begun, *opening)
            return session

        # The engine's thread finds the failure, and the listener lives on the loop.
        self.begin(spec.session_id, open_session, partial(self._loop.call_soon_threadsafe, listener.on_failure))

    @property
    def kv_cache_use(self) -> tuple[int, int]:
        """Slots that hold keys and values, and the memory held for them in bytes, of all sessions."""
        # A copy, made in one go: the engine's thread may change the dict, which must not happen while it is iterated.
        caches = [session.cache for session in list(self.sessions.values())]
        return sum(cache.length for cache in caches), sum(cache.num_bytes for cache in caches)

    # On the engine's thread.

    def plan(self, now: float) -> tuple[list[VerifySession], float | None]:
        """Returns the sessions whose round begins now; if there are none, how long to wait for something to be posted,
        where None means without end."""
        self._timings.set_num_sessions(len(self.sessions))
        ready: list[VerifySession] = []
        waiting: list[VerifySession] = []
        for session in self.sessions.values():
            if not session.is_paused:
                (ready if session.is_ready(now) else waiting).append(session)
        # Paused sessions need no deadline: their reader's progress is posted.
        if not waiting:
            return ready, None
        until = min(session.deadline for session in waiting)
        if ready:
            held_since = min(session.ready_since or now for session in ready)
            until = min(until, held_since + HOLD_SHARE * self._timings.forward_ms.get(0.0) / 1e3)
            if until <= now:
                return ready, None
        return [], max(0.0, until - now)

    def step(self, work: list[VerifySession]) -> None:
        """Runs one forward, draws for each row, and delivers a verdict for each session that is past its prompt."""
        started = time.perf_counter()
        segments = self._segments(work)
        self._stopwatch.start()
        logits = self._runner.forward(segments)
        self._stopwatch.stop()
        # Without logits, and so without a verdict, are the pieces of prompts that are not through.
        drawing = [session for session, segment in zip(work, segments, strict=True) if segment.num_logits]
        draws = emitted(self._sampler, logits, [_round(session) for session in drawing])
        # Asked behind the draws: an asynchronous device has only been told of the forward when that returns. Pieces of
        # prompts alone have no draws, and nothing waits for them.
        forward_ms = self._stopwatch.elapsed_ms() if drawing else 0.0
        # Drafts that came during the forward: the verdict counts as a hit if they have its next token, and the next
        # round goes on from them.
        self.take_posted(0.0)
        now = time.perf_counter()
        self._measure(segments, forward_ms, num_verdicts=len(drawing))
        verdicts = []
        for session, token_ids in zip(drawing, draws, strict=True):
            verdict = session.apply(token_ids, forward_ms, started, now)
            verdicts.append((session.listener, verdict, session.session.statistics, session.peer_requests()))
            if verdict.finish_reason is not None:
                self.remove(session.session.spec.session_id)
        if verdicts:
            # One call for all of them: each one would write to the pipe that wakes the loop.
            self._loop.call_soon_threadsafe(_deliver, verdicts)

    def _segments(self, work: list[VerifySession]) -> list[Segment]:
        """Makes the rows of all sessions; the first prompts take the rows that are there for prompts."""
        # Sessions share the rows equally; one row of each is for its last committed token.
        prefill_rows, max_num_nodes = self._prefill_chunk, max(0, self._max_rows // len(work) - 1)
        segments = []
        for session in work:
            # One row at least: a prompt that got none would come out as a segment without rows.
            segment = session.segment(max(1, prefill_rows), max_num_nodes)
            # Rows without logits are those of a prompt: a session that decodes has none.
            prefill_rows -= len(segment.token_ids) - segment.num_logits
            segments.append(segment)
        return segments

    def _measure(self, segments: list[Segment], forward_ms: float, num_verdicts: int) -> None:
        num_rows = sum(len(segment.token_ids) for segment in segments)
        if num_verdicts:
            self.counts.add_forward(forward_ms, num_rows)
        # A drafter that is only tried may slow the forward down: it would seem to be no slower than a plain one.
        if any(session.is_probing for session in self.sessions.values()):
            return
        # A forward with a piece of a prompt in it, the last one too, says nothing of those that only decode. Rows
        # without logits are those of prompts.
        if all(len(segment.token_ids) == segment.num_logits for segment in segments):
            self._timings.forward_ms.add(forward_ms)
            self._timings.forward_times.observe(num_rows, forward_ms)


def _round(session: VerifySession) -> Round:
    """Describes the rows of a session for the sampler: the noise of each is keyed by its output index."""
    generation = session.session
    first = generation.num_output_tokens
    # Minus the length of the prompt: what follows position p has the output index p + 1 + offset.
    offset = first - len(generation.committed)
    indices = [first, *(node.position + 1 + offset for node in session.nodes)]
    return Round(generation.spec.sampling, indices, session.nodes if generation.decides_by_ratio else None)


def _deliver(verdicts: list[tuple[GenerationListener, Verdict, Statistics, PeerRequests]]) -> None:
    for listener, verdict, statistics, requests in verdicts:
        listener.on_verdict(verdict, statistics, requests)
