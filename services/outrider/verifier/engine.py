"""The verifier's engine: one thread that runs the rounds of all sessions, a packed forward at a time.

The thread takes one `turn` after the other: plan the next batch, launch it, judge the flight before it. If the host has
to compute nothing of the next batch from that flight, a GPU gets the batch before the flight is judged (overlap
scheduling): tokens that are still to be drawn stay on the device. On a CPU, or with overlap off, the same code launches
the batch after the verdicts. The thread never waits for the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import structlog

from outrider.core.costs import Contexts, ForwardTimes
from outrider.core.reports import TokenLogprobs
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Statistics
from outrider.core.tree import TokenId
from outrider.models.acceptance import Round, begin_rounds, draws_of
from outrider.models.engine import EngineThread, is_own_fault
from outrider.models.loading import LoadedModel
from outrider.models.logprobs import round_logprobs
from outrider.models.residency import Residency
from outrider.models.sampling import Logits, Sampler
from outrider.models.text import TextCodec
from outrider.models.timing import Stopwatch, stopwatch_for
from outrider.rounds.timings import Activity, EngineTimings
from outrider.verifier.flight import Batch, Flight, begin_logprobs, begin_next_tokens, tell_of_prompts
from outrider.verifier.listener import GenerationListener, NoRoom, PeerRequests, Reading
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.round import Forward
from outrider.verifier.scheduler import Scheduler
from outrider.verifier.session import Phase, VerifySession

log = structlog.get_logger(__name__)

_Delivery = tuple[GenerationListener, Verdict, Statistics, PeerRequests]


class Engine(EngineThread[VerifySession]):
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
        max_num_sessions: int = 64,
        queue_timeout_s: float = 30.0,
        stopwatch: Stopwatch | None = None,
        overlaps: bool = True,
    ) -> None:
        """
        Args:
            model: The target.
            loop: Event loop on which listeners are called.
            forward_times: Times of a forward by its rows.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward; chains and sub-trees are cut to fit.
            max_num_rows: Most drafted rows of one session's sub-tree if its request names no number.
            max_num_sessions: Most sessions that have room in the pool at a time; others wait.
            queue_timeout_s: Longest that a new session waits for room.
            stopwatch: Times the forwards. None means the one for the target's device.
            overlaps: False to launch each batch after the verdicts of the previous one, on a GPU too.
        """
        super().__init__("verifier-engine", model.runner, loop)
        self.counts = RoundCounts()
        self.timings = EngineTimings(forward_times, max_num_rows)
        """Measurements of all sessions."""
        self.sampler = Sampler()
        """Draws the tokens. May be replaced before the first session."""
        self._codec = TextCodec(model.tokenizer)
        self.stopwatch = stopwatch or stopwatch_for(model.runner.device)
        """Times the forwards. May be replaced before the first session."""
        self._loop = loop
        self._queue_timeout_s = queue_timeout_s
        self._verdicts: list[_Delivery] = []
        """Verdicts that are not delivered to the loop yet."""
        self.overlaps = overlaps and model.runner.pool.shape.device.type == "cuda"
        """True if a batch is launched while the device runs the previous one. Verdicts are then delivered after the
        next launch: before it, the event loop would take the interpreter from this thread."""
        self._flight: Flight | None = None
        """The flight that is launched and not judged yet. None during a turn."""
        self._done_at = 0.0
        """Time at which the device ended the latest judged flight, computed from its duration."""
        self._idle_since: float | None = None
        """Time at which the device last went idle waiting for this thread. None: it is busy, or waits for others."""
        self.residency: Residency[VerifySession] = Residency(model.runner.pool, max_num_sessions)
        """Sessions by age, those with room in the pool and those that wait for it. Others may read its counts."""
        self.scheduler = Scheduler(
            self.residency,
            self.timings,
            self.isolated,
            prefill_chunk=prefill_chunk,
            max_rows=max_rows,
            vocab_size=model.runner.vocab_size,
        )
        """Plans the batches."""
        self.start()  # last: the thread reads all of the above

    def open(
        self,
        spec: SessionSpec,
        listener: GenerationListener,
        tiers: TierSource | None = None,
        *,
        has_drafter: bool = True,
        salt: str | None = None,
        elder_id: str = "",
    ) -> None:
        """Begins a generation. It waits until there is room for it.

        Args:
            spec: The request.
            listener: Receives the verdicts.
            tiers: Copies of the datastore's tiers. None means that there is no datastore.
            has_drafter: True if drafts will come, should the method want any.
            salt: Generations of the same salt find each other's prefixes. None means that this one shares none.
            elder_id: Names the session of a generation that has read the same prompt. Empty means that there is none.
        """

        def open_session() -> VerifySession:
            if spec.largest_token_id >= self._runner.vocab_size:
                # A forward would fail for all sessions, and a bias would change another one's logits.
                raise ValueError(f"a token id is not in [0, {self._runner.vocab_size}), the rows of the model's head")
            cache = self._runner.new_cache(salt)
            # Prompt log-probabilities are wanted of the whole prompt, also of a prefix that other sessions have read.
            cache.finds = spec.report.prompt_logprobs is None
            now = time.perf_counter()
            elder = self.sessions.get(elder_id)
            timings, counts = self.timings, self.counts
            session = VerifySession(
                spec, listener, cache, timings, counts, tiers, now, self._codec, elder=elder, has_drafter=has_drafter
            )
            self.residency.add(session)
            if (opening := session.opening()) is not None:
                self._tell(listener.on_begun, *opening)
            return session

        # The engine's thread finds the failure, and the listener lives on the loop.
        self.begin(
            spec.session_id,
            open_session,
            partial(self._tell, listener.on_failure),
        )

    # On the engine's thread.

    def turn(self, now: float) -> float | None:
        """Launches the next batch and judges the flight before it, whichever of the two there is. The launch comes
        first: a batch is planned from the flight before its verdicts, and the verdicts must know what is launched
        already."""
        flight, self._flight = self._flight, None  # if anything fails here, all sessions go, and the flights with them
        launched, until_refused = None, None
        if flight is None or self.overlaps:
            until_refused = self._admit(now)
            batch = self.scheduler.next(now, after=flight)
            launched = None if batch is None else self._launch(batch)
        if flight is not None:
            self._judge(flight, launched)
        self._flight = launched
        if flight is not None or launched is not None:
            return 0.0
        self._idle_since = None  # drafts or requests are waited for
        waits = [each for each in (self.scheduler.wait_s, until_refused) if each is not None]
        return min(waits, default=None)

    def _admit(self, now: float) -> float | None:
        """Admits sessions for which there is room; returns for how many seconds the first of the others may still
        wait."""
        for session in self.residency.admit():
            with self.isolated(session.spec.session_id):
                session.enter(now)
                self._tell(session.listener.on_admitted, session.cache.length)
        until_refused = self._refuse_those_that_waited_too_long(now)
        residents = self.residency.residents
        activities = [Activity.of(session.choice.strategy) for session in residents]
        self.timings.set_sessions(activities, sum(session.cache.length for session in residents))
        return until_refused

    def _refuse_those_that_waited_too_long(self, now: float) -> float | None:
        """Ends new sessions for which there was no room in time; returns after how many seconds to check again."""
        left_s = None
        for session in self.residency.waiting:
            if session.phase is not Phase.WAITING:
                continue  # its text is under way: it goes on, however late
            session_left_s = session.opened_at + self._queue_timeout_s - now
            if session_left_s <= 0:
                self._tell(session.listener.on_no_room)
                self.remove(session.spec.session_id)
            else:
                left_s = session_left_s if left_s is None else min(left_s, session_left_s)
        return left_s

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for room in the pool. May be read in any thread."""
        return len(self.residency.waiting)

    def ask_for_news(self, session_id: str) -> None:
        """Has the engine's own thread tell a session's listener why there is no verdict: a thread that hangs tells
        nothing. May be called in any thread."""

        def tell(session: VerifySession) -> None:
            news: NoRoom | Reading
            if not self.residency.has(session):
                news = NoRoom(self.num_waiting)
            elif session.round.is_prefilling:
                news = Reading(session.cache.length, len(session.generation.committed))
            else:
                return
            self._tell(session.listener.on_news, news)

        self.post(session_id, tell)

    def settle(self) -> None:
        """Delivers the verdicts."""
        self._deliver()

    def removed(self, session: VerifySession, *, has_failed: bool) -> None:
        """Gives the session's blocks back; other sessions can find its text as a prefix."""
        self.residency.discard(session, has_failed=has_failed)

    def _launch(self, batch: Batch) -> Flight:
        """Asks the device for a forward, and for everything that is read of it. Does not wait for a GPU; a CPU computes
        it here."""
        drawing, rounds, segments = batch.drawing, batch.rounds, batch.segments
        contexts = Contexts(sum(segment.cache.length for segment in segments), len(segments))
        known = draws_of(rounds)
        timing = self.stopwatch.start()
        timed_from = time.perf_counter()
        logits = self._runner.forward(segments, draws=None if known.is_greedy else known, drawn=batch.drawn)
        timing.stop()
        launched_at = time.perf_counter()
        logits = tell_of_prompts(logits, batch, self.isolated)
        draws = begin_rounds(self.sampler, logits, rounds, known)
        next_tokens = begin_next_tokens(logits, drawing)
        logprobs = begin_logprobs(logits, drawing, rounds, draws.drawn) if self.overlaps else tuple
        if self._idle_since is not None:
            self.counts.gaps.add(launched_at - self._idle_since)
            self._idle_since = None
        self._deliver()
        return Flight(
            batch, contexts, logits, draws, next_tokens, logprobs, timing, launched_at, timed_from, batch.is_decoding
        )

    def _judge(self, flight: Flight, launched: Flight | None) -> None:
        """Waits for a flight, makes its verdicts, and learns from it.

        Args:
            flight: The flight.
            launched: The one after it, which the device has been asked for already. None: there is none.
        """
        drawing = flight.batch.drawing
        if not any(map(self.residency.has, flight.batch.work)):
            return  # no session waits for it any more
        draws = flight.draws.wait()
        known_at = time.perf_counter()
        self._idle_since = known_at if drawing and launched is None else None
        going_on = _going_on(flight, launched)
        # Read after the draws: on an asynchronous device, `forward` returns before the work is done. Pieces of prompts
        # alone have no draws, and nothing waits for them.
        forward_ms = flight.timing.elapsed_ms() if drawing else 0.0
        # The forward began when it was launched, or when the previous one ended.
        self._done_at = max(self._done_at, flight.timed_from) + forward_ms / 1e3
        if launched is not None and drawing:  # pieces of prompts alone are not timed
            self.counts.gaps.add(max(0.0, launched.launched_at - self._done_at))
        # Takes drafts in that came during the forward: the verdict counts as a hit if they have its next token, and the
        # next round goes on from them.
        self.take_posted(0.0)
        now = time.perf_counter()
        self._measure(flight, forward_ms)
        # If a launch should come first, `_launch` delivers the verdicts: delivered now, they would take the interpreter
        # from this thread while the device waits. Peers are never kept waiting.
        deliver_now = not self.overlaps or launched is not None
        for session, verdict in list(self._verdicts_of(flight, draws, forward_ms, now, going_on)):
            with self.isolated(session.spec.session_id):
                deliver_now = self._take_verdict(session, verdict) or deliver_now
        self._end_step(drawing, now, is_typical=flight.is_decoding)
        if deliver_now:
            self._deliver()
        self.step_done()

    def _verdicts_of(
        self,
        flight: Flight,
        draws: Sequence[list[TokenId]],
        forward_ms: float,
        now: float,
        going_on: Collection[VerifySession],
    ) -> Iterator[tuple[VerifySession, Verdict]]:
        """Makes the verdicts of a flight. Sessions that fail at theirs are left out.

        Args:
            flight: The flight.
            draws: The target's tokens for the rows of each session.
            forward_ms: Time of the forward.
            now: Time at which its draws were known, and the drafts that had come by then were taken in.
            going_on: Sessions whose next row is in the cache already.
        """
        batch, next_tokens, first_row = flight.batch, flight.next_tokens(), 0
        forward = Forward(batch.started, now, forward_ms, batch.num_rows)
        logprobs = flight.logprobs() or [None] * len(batch.drawing)
        for session, round_, token_ids, known in zip(batch.drawing, batch.rounds, draws, logprobs, strict=True):
            rows = slice(first_row, first_row + len(round_.output_indices))
            first_row = rows.stop
            if session in flight.void or not self.residency.has(session):
                continue  # drawn for already; or closed a moment ago by what was posted: its cache is empty
            if round_.structured is not None and round_.structured.error:
                self._tell(session.listener.on_broken, round_.structured.error)
                self.remove(session.spec.session_id)
                continue
            verdict = None
            with self.isolated(session.spec.session_id):
                if round_.structured is not None and round_.structured.failure is not None:
                    raise round_.structured.failure
                verdict = session.settle(token_ids, forward, next_tokens[rows], is_ahead=session in going_on)
                if session.spec.report.logprobs is not None:
                    of_rows = flight.logits[rows]
                    verdict = verdict._replace(logprobs=_logprobs(session, of_rows, round_, verdict, known))
            if verdict is not None and self.residency.has(session):
                yield session, verdict

    def _take_verdict(self, session: VerifySession, verdict: Verdict) -> bool:
        """Takes a verdict to be delivered; returns True if a peer waits for it."""
        requests = session.peer_requests()
        self._verdicts.append((session.listener, verdict, session.generation.statistics, requests))
        if verdict.finish_reason is not None:
            self.remove(session.spec.session_id)
        elif session.take_commits is not None:
            session.take_commits(session.generation.committed)
        # Peers in other processes go on from a verdict: they are told at once.
        return (session.drafter.is_drafting and session.take_commits is None) or requests.question is not None

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        """Has the event loop call a listener, after it has delivered the listener's verdicts."""
        self._deliver()
        self._loop.call_soon_threadsafe(call, *args)

    def _deliver(self) -> None:
        """Tells the loop of the verdicts since the last time."""
        if self._verdicts:
            verdicts, self._verdicts = self._verdicts, []
            # One call for all of them: each call writes to the pipe that wakes the loop.
            self._loop.call_soon_threadsafe(_tell_verdicts, verdicts)

    def _end_step(self, drawing: Sequence[VerifySession], now: float, *, is_typical: bool) -> None:
        """Has the sessions that share forwards learn from a step, including those that were not ready for it."""
        stepped = set(drawing)
        others = [each for each in self.residency.residents if each.choice.is_auto and each not in stepped]
        sessions = [session for session in drawing if session.choice.is_auto]
        # Sessions paused for a slow reader have nothing to wait for here.
        sessions += [each for each in others if not (each.phase is Phase.PAUSED or each.round.is_prefilling)]
        shares = [session.choice.take_share() for session in sessions]
        self.timings.end_step(shares, now, is_typical=is_typical)

    def _measure(self, flight: Flight, forward_ms: float) -> None:
        """Counts a forward and its time, and learns from it if that is typical."""
        num_rows = flight.batch.num_rows
        if flight.batch.drawing:
            self.counts.add_forward(forward_ms, num_rows)
        # A drafter on trial may slow the forward down: the forward with it would then seem no slower than a plain one.
        if flight.is_decoding and not any(session.choice.is_probing for session in self.sessions.values()):
            self.timings.forward_ms.add(forward_ms)
            self.timings.forward_times.observe(num_rows, forward_ms, flight.contexts)


def _going_on(flight: Flight, launched: Flight | None) -> Collection[VerifySession]:
    """Returns the sessions of a flight whose next rows, fed with the tokens that the host has found, are in the flight
    launched after it."""
    if launched is None or flight.draws.drawn is None:
        return ()
    unsettled = {flight.batch.drawing[row] for row in flight.draws.drawn.unsettled}
    going_on = set(launched.batch.work).intersection(flight.batch.drawing)
    # For these the device has gone on from other tokens.
    launched.void |= going_on & unsettled
    return going_on - unsettled


def _logprobs(
    session: VerifySession, logits: Logits, round_: Round, verdict: Verdict, known: TokenLogprobs | None
) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of what a round commits; if it has a single draw, they may be known already."""
    if known is not None:
        return (known,)[: len(verdict.token_ids)]
    return round_logprobs(logits, round_, verdict, session.spec.report)


def _tell_verdicts(verdicts: Iterable[_Delivery]) -> None:
    for listener, verdict, statistics, requests in verdicts:
        try:
            listener.on_verdict(verdict, statistics, requests)
        except Exception as error:
            # The generations after it would wait for their verdicts for ever.
            log.exception("engine.verdict_untold")
            listener.on_failure(is_own_fault(error))
