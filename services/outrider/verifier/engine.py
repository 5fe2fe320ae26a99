"""The verifier's engine: one thread that runs the rounds of all sessions, a packed forward at a time.

It never waits for the event loop: it takes what was posted to its inbox, asks every session whether its next round
should begin, and runs one forward for those that are ready. What a step decided goes to the loop in one call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import structlog

from outrider.core.costs import Contexts, ForwardTimes
from outrider.core.reports import TokenLogprobs
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import Statistics
from outrider.core.tree import TokenId
from outrider.models.engine import EngineThread, is_own_fault
from outrider.models.loading import LoadedModel
from outrider.models.logprobs import round_logprobs
from outrider.models.pending_draft import PendingDraft
from outrider.models.ratio import Round, begin_rounds, draws_of
from outrider.models.residency import Residency
from outrider.models.sampling import Logits, Sampler
from outrider.models.text import TextCodec
from outrider.models.timing import Stopwatch, stopwatch_for
from outrider.verifier.draft_skips import DraftSkips
from outrider.verifier.forward_planner import ForwardPlanner
from outrider.verifier.listener import GenerationListener, NoRoom, PeerRequests, Reading
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.micro_batches import MicroBatches
from outrider.verifier.rounds_behind_drafts import RoundBehind, RoundsBehindDrafts
from outrider.verifier.session import VerifySession
from outrider.verifier.shared_forward import (
    AskedForward,
    AskedTimes,
    PlannedForward,
    begin_logprobs,
    begin_next_tokens,
    is_decoding,
    ready_sessions,
    tell_of_prompts,
)
from outrider.verifier.timings import Activity, EngineTimings

log = structlog.get_logger(__name__)

_Delivery = tuple[GenerationListener, Verdict, Statistics, PeerRequests]


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
        max_num_sessions: int = 64,
        queue_timeout_s: float = 30.0,
        stopwatch: Stopwatch | None = None,
        stream_priority: int | None = None,
    ) -> None:
        """
        Args:
            model: The target.
            loop: Event loop on which listeners are called.
            forward_times: Times of a forward by its rows.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward; chains and sub-trees are cut to fit.
            max_num_rows: Most drafted rows of one session's sub-tree, where its request names no number.
            max_num_sessions: Most sessions that have room in the pool at a time; others wait.
            queue_timeout_s: Longest that a new session waits for room.
            stopwatch: Times the forwards. None means the one for the target's device.
            stream_priority: See `EngineThread`.
        """
        super().__init__("verifier-engine", model.runner, stream_priority, loop)
        self.counts = RoundCounts()
        self._timings = EngineTimings(forward_times, max_num_rows)
        self.sampler = Sampler()
        """Draws. Another one may take its place before the first session."""
        self._codec = TextCodec(model.tokenizer)
        self.stopwatch = stopwatch or stopwatch_for(model.runner.device)
        """Times the forwards. Another one may take its place before the first session."""
        self._loop = loop
        self._micro_batches = MicroBatches(forward_times)
        self._draft_skips = DraftSkips()
        self._behind_drafts = RoundsBehindDrafts(self._timings)
        self._pending_draft: PendingDraft | None = None
        """The latest draft that the draft model was asked for, if nobody has looked at it yet."""
        self._queue_timeout_s = queue_timeout_s
        self._verdicts: list[_Delivery] = []
        """Verdicts that the loop has not been told of yet."""
        self.works_on = model.runner.pool.shape.device.type == "cuda"
        """True for a device that works on by itself, and of which single results can be waited for. It is asked for the
        next forward first, and the rest is done while it runs. The loop is told of verdicts then, too: told before, it
        would take the interpreter from this thread."""
        self._ahead: AskedForward | None = None
        """The forward of the next step, if the device was asked for it in the step before."""
        self._idle_since: float | None = None
        """Time since which the device waits for this process alone. None means that it does not."""
        self._done_at = 0.0
        """Time at which the device has ended the latest forward that was waited for, as far as its duration tells."""
        self.residency: Residency[VerifySession] = Residency(model.runner.pool, max_num_sessions)
        """Sessions by age, those with room in the pool and those that wait for it. Others may read its counts."""
        self._planner = ForwardPlanner(
            self.residency,
            self._timings,
            self._micro_batches,
            self._behind_drafts,
            self.isolated,
            prefill_chunk=prefill_chunk,
            max_rows=max_rows,
            vocab_size=model.runner.vocab_size,
        )
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
            # What the forward says of a prompt is wanted of all of it, also of what others have read.
            cache.finds = spec.report.prompt_logprobs is None
            now = time.perf_counter()
            elder = self.sessions.get(elder_id)
            timings, counts = self._timings, self.counts
            session = VerifySession(
                spec, listener, cache, timings, counts, tiers, now, self._codec, elder=elder, has_drafter=has_drafter
            )
            self.residency.add(session)
            if (opening := session.opening()) is not None:
                self._loop.call_soon_threadsafe(listener.on_begun, *opening)
            return session

        # The engine's thread finds the failure, and the listener lives on the loop.
        self.begin(
            spec.session_id,
            open_session,
            lambda is_own: self._loop.call_soon_threadsafe(listener.on_failure, is_own),
        )

    def follow(self, draft: PendingDraft) -> None:
        """Verifies a draft behind which the device can be asked for a round, if its sessions are all that share
        forwards. May be called by any thread."""
        self._put(partial(setattr, self, "_pending_draft", draft))

    # On the engine's thread.

    def plan(self, now: float) -> tuple[list[VerifySession], float | None]:
        """Returns the sessions whose round begins now; if there are none, how long to wait for something to be posted,
        where None means without end."""
        for session in self.residency.admit():
            with self.isolated(session.session.spec.session_id):
                session.enter(now)
                self._loop.call_soon_threadsafe(session.listener.on_admitted, session.cache.length)
        until_refused = self._refuse_those_that_waited_too_long(now)
        residents = self.residency.residents
        activities = [Activity.of(session.choice.strategy) for session in residents]
        self._timings.set_sessions(activities, sum(session.cache.length for session in residents))
        # Paused sessions need no deadline: their reader's progress is posted.
        running = [session for session in residents if not session.is_paused]
        draft, self._pending_draft = self._pending_draft, None
        if draft is not None and running and self._ahead is None and self.works_on:
            self._ahead = self._ask_behind(draft, running)
        if self._ahead is not None:
            if left := [session for session in self._ahead.plan.work if self.residency.has(session)]:
                return left, None
            self._ahead = None  # nobody waits for it
        ready, wait_s = ready_sessions(running, now, self._timings.forward_ms.get(0.0), self.isolated)
        if wait_s is None and ready:
            return ready, None
        self._idle_since = None  # drafts or requests are waited for
        self._micro_batches.forget_host_time()
        if wait_s is None:
            return [], until_refused
        return [], min(wait_s, math.inf if until_refused is None else until_refused)

    def _refuse_those_that_waited_too_long(self, now: float) -> float | None:
        """Ends new sessions for which there was no room in time; returns when that is to be asked again."""
        left_s = None
        for session in self.residency.waiting:
            if session.has_begun:
                continue  # its text is under way: it goes on, however late
            session_left_s = session.opened_at + self._queue_timeout_s - now
            if session_left_s <= 0:
                self._loop.call_soon_threadsafe(session.listener.on_no_room)
                self.remove(session.session.spec.session_id)
            else:
                left_s = session_left_s if left_s is None else min(left_s, session_left_s)
        return left_s

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for room in the pool. May be read in any thread."""
        return len(self.residency.waiting)

    def ask_for_news(self, session_id: str) -> None:
        """Has the engine's own thread tell a session's listener why there is no verdict: one that hangs tells nothing.
        May be called in any thread."""

        def tell(session: VerifySession) -> None:
            news: NoRoom | Reading
            if not self.residency.has(session):
                news = NoRoom(self.num_waiting)
            elif session.is_prefilling:
                news = Reading(session.cache.length, len(session.session.committed))
            else:
                return
            self._loop.call_soon_threadsafe(session.listener.on_news, news)

        self.post(session_id, tell)

    def settle(self) -> None:
        """Tells the loop of verdicts: what was posted may lead to other calls of their listeners."""
        self._deliver()

    def removed(self, session: VerifySession, *, has_failed: bool) -> None:
        """Gives the session's blocks back; what it has said can be found again."""
        if has_failed:
            self._deliver()  # the listener hears of the failure next
        self.residency.discard(session, has_failed=has_failed)

    def step(self, work: list[VerifySession]) -> None:
        """Runs one forward, draws for each row, and delivers a verdict for each session that is past its prompt."""
        forward, self._ahead = self._ahead, None
        if forward is None:
            plan = self._planner.plan(work, may_halve=self.works_on)
            if plan is None:
                return  # all of them have lost their room to others
            forward = self._ask(plan)
        self._finish(forward)

    def _ask(self, plan: PlannedForward) -> AskedForward:
        """Asks the device for a forward, and for all that is read of it; waits for nothing."""
        drawing, rounds, segments = plan.drawing, plan.rounds, plan.segments
        contexts = Contexts(sum(segment.cache.length for segment in segments), len(segments))
        known = draws_of(rounds)
        timing = self.stopwatch.start()
        timed = time.perf_counter()
        logits = self._runner.forward(segments, draws=None if known.is_greedy else known, drawn=plan.drawn)
        timing.stop()
        asked = time.perf_counter()
        logits = tell_of_prompts(logits, plan.work, segments, self.isolated)
        draws = begin_rounds(self.sampler, logits, rounds, known)
        next_tokens = begin_next_tokens(logits, drawing)
        logprobs = begin_logprobs(logits, drawing, rounds, draws.drawn) if self.works_on else tuple
        if self._idle_since is not None:
            self.counts.gaps.add(asked - self._idle_since)
            self._idle_since = None
        self._micro_batches.end_host_time(asked)
        self._deliver()
        times = AskedTimes(timing, timed, asked)
        return AskedForward(plan, contexts, logits, draws, next_tokens, logprobs, times)

    def _ask_behind(self, draft: PendingDraft, running: Sequence[VerifySession]) -> AskedForward | None:
        """Asks the device for the round behind a draft that it is still at; None where the draft is waited for."""
        plan = self._planner.plan_behind(draft, running)
        if plan is None:
            return None
        self._idle_since = None  # the device is at the draft
        self._micro_batches.forget_host_time()
        return self._ask(plan)

    def _ask_early(self, forward: AskedForward) -> AskedForward | None:
        """Asks a device that works on by itself for what comes behind a forward that it is still at; None where that is
        not known yet."""
        if not self.works_on:
            return None
        plan = self._planner.plan_ahead(forward) or self._planner.plan_of_others(forward)
        return None if plan is None else self._ask(plan)

    def _finish(self, forward: AskedForward) -> None:
        """Asks for the next forward if it is known, waits for this one, and makes the verdicts."""
        plan = forward.plan
        self._ahead = self._ask_early(forward)
        if self._ahead is None:
            self._deliver()  # of the other half, for which nothing was asked
        draws = forward.draws.wait()
        known_at = time.perf_counter()
        kept = None
        if plan.behind is not None:
            drawn = zip(plan.drawing, draws, strict=True)
            kept = plan.behind.kept({each: its for each, its in drawn if self.residency.has(each)})
            if kept:
                plan.behind.go_on(kept)
        self._idle_since = known_at if plan.drawing and self._ahead is None else None
        self._micro_batches.begin_host_time(known_at, plan.drawing)
        going_on = self._going_on(forward)
        # Asked behind the draws: an asynchronous device has only been told of the forward when that returns. Pieces of
        # prompts alone have no draws, and nothing waits for them.
        forward_ms = forward.times.timing.elapsed_ms() if plan.drawing else 0.0
        # It has begun when it was asked for, or behind the one before, or behind its draft.
        self._done_at = max(self._done_at, forward.times.timed, plan.drafted_at) + forward_ms / 1e3
        if self._ahead is not None:
            self.counts.gaps.add(max(0.0, self._ahead.times.asked - self._done_at))
        # Drafts that came during the forward: the verdict counts as a hit if they have its next token, and the next
        # round goes on from them.
        self.take_posted(0.0)
        now = time.perf_counter()
        is_typical = is_decoding(plan.work, plan.segments)
        self._measure(forward, forward_ms, is_typical=is_typical)
        self._timings.set_others(plan.num_rows, plan.num_rows_of_others, forward_ms)
        # Where these sessions have to be asked for again, the loop is told when that is done.
        is_urgent = not self.works_on or bool(going_on)
        verdicts = list(self._judged(forward, draws, forward_ms, now, going_on))
        is_urgent = self._take_verdicts(verdicts, plan.behind if kept is None else None) or is_urgent
        self._end_step(plan.drawing, now, is_typical=is_typical)
        if is_urgent:
            self._deliver()

    def _judged(
        self,
        forward: AskedForward,
        draws: Sequence[list[TokenId]],
        forward_ms: float,
        now: float,
        going_on: Collection[VerifySession],
    ) -> Iterator[tuple[VerifySession, Verdict]]:
        """Makes the verdicts of a forward, of the sessions that do not fail at it.

        Args:
            forward: The forward.
            draws: The target's tokens for the rows of each session.
            forward_ms: Time of the forward.
            now: Time at which its draws were there.
            going_on: Sessions whose next row is in the cache already.
        """
        plan, next_tokens, first_row = forward.plan, forward.next_tokens(), 0
        num_rows = plan.num_rows
        logprobs = forward.logprobs() or [None] * len(plan.drawing)
        started = max(plan.started, plan.drafted_at)
        for session, round_, token_ids, known in zip(plan.drawing, plan.rounds, draws, logprobs, strict=True):
            rows = slice(first_row, first_row + len(round_.output_indices))
            first_row = rows.stop
            if session in forward.void or not self.residency.has(session):
                continue  # drawn for already; or closed a moment ago, by what was posted: its cache is empty
            followers = next_tokens[rows]
            if round_.structured is not None and round_.structured.error:
                self._loop.call_soon_threadsafe(session.listener.on_broken, round_.structured.error)
                self.remove(session.session.spec.session_id)
                continue
            verdict = None
            with self.isolated(session.session.spec.session_id):
                if round_.structured is not None and round_.structured.failure is not None:
                    raise round_.structured.failure
                if plan.behind is not None:
                    token_ids, followers = self._behind_drafts.settle(plan.behind, session, token_ids, followers)
                # Of this round, as the verdict begins another; of none whose drafter was lost, or that has lost its
                # room.
                expected, has_skipped = session.expected if session.takes_turns else None, session.skips_draft
                verdict = session.apply(
                    token_ids, forward_ms, started, now, followers, num_rows, is_ahead=session in going_on
                )
                if session.session.spec.report.logprobs is not None:
                    of_rows = forward.logits[rows]
                    verdict = verdict._replace(logprobs=_logprobs(session, of_rows, round_, verdict, known))
                if expected is not None:
                    self._draft_skips.learn(expected, 1 + verdict.num_accepted, has_skipped=has_skipped)
            if verdict is not None and self.residency.has(session):
                yield session, verdict

    def _skip_drafts(self, going_on: Sequence[VerifySession]) -> None:
        """Has sessions that take turns with the draft model begin their next rounds without drafts, if that brings more
        tokens in its time than the drafts would."""
        # First what nobody has who does not draft: this is asked in every step.
        if not going_on or not all(session.may_skip_draft and session.takes_turns for session in going_on):
            return
        # Who reads a prompt waits for no draft.
        others = [each for each in self.residency.residents if not (each.is_paused or each.is_prefilling)]
        sharing = {session for session in others if session.session.finish_reason is None}
        if sharing == set(going_on):
            timings = self._timings
            round_ms = timings.forward_ms.get(0.0) + timings.overhead_ms(Activity.DRAFTING)
            self._draft_skips.choose(going_on, round_ms, timings.speculator_ms.value)

    def _take_verdicts(self, verdicts: Sequence[tuple[VerifySession, Verdict]], behind: RoundBehind | None) -> bool:
        """Takes verdicts to tell the loop of; returns True if that is urgent.

        Args:
            verdicts: Those of a forward.
            behind: Its rows, if it was not known before what they keep, and who waits for another draft. None for any
                other forward.
        """
        going_on = [(session, verdict) for session, verdict in verdicts if verdict.finish_reason is None]
        self._skip_drafts([session for session, _ in going_on])
        if behind is not None:
            # Of others the loop tells the draft model: by it a new strategy comes together with what was kept, and
            # nobody else's verdict waits for the draft model's thread.
            as_before = [each for each in going_on if each[0].is_drafting and not each[0].choice.has_changed]
            if len(as_before) == len(behind.rows):
                behind.go_on({session: verdict.token_ids for session, verdict in as_before})
        is_urgent = False
        for session, verdict in verdicts:
            with self.isolated(session.session.spec.session_id):
                is_urgent = self._take_verdict(session, verdict) or is_urgent
        return is_urgent

    def _take_verdict(self, session: VerifySession, verdict: Verdict) -> bool:
        """Takes a verdict to tell the loop of; returns True if that is urgent."""
        requests = session.peer_requests()
        self._verdicts.append((session.listener, verdict, session.session.statistics, requests))
        if verdict.finish_reason is not None:
            self.remove(session.session.spec.session_id)
        # Peers go on from a verdict: they are told at once.
        return session.is_drafting or requests.question is not None

    def _going_on(self, forward: AskedForward) -> Collection[VerifySession]:
        """Returns the sessions of a forward whose rows are in the next one, which the device has been asked for."""
        if self._ahead is None or forward.draws.drawn is None:
            return ()
        going_on = set(self._ahead.plan.work).intersection(forward.plan.work)
        unsettled = {forward.plan.drawing[row] for row in forward.draws.drawn.unsettled}
        if going_on and unsettled:
            # The device has gone on from other tokens.
            self._ahead = self._ahead._replace(void=unsettled)
        return going_on - unsettled

    def _deliver(self) -> None:
        """Tells the loop of the verdicts since the last time."""
        if self._verdicts:
            verdicts, self._verdicts = self._verdicts, []
            # One call for all of them: each one would write to the pipe that wakes the loop.
            self._loop.call_soon_threadsafe(_tell, verdicts)

    def _end_step(self, drawing: Sequence[VerifySession], now: float, *, is_typical: bool) -> None:
        """Has the sessions that share forwards learn from a step, also those that were not ready for it."""
        stepped = set(drawing)
        others = [each for each in self.residency.residents if each.choice.is_auto and each not in stepped]
        sessions = [session for session in drawing if session.choice.is_auto]
        # Those whose reader is too slow for them have nothing to wait for here.
        sessions += [each for each in others if not (each.is_paused or each.is_prefilling)]
        shares = [session.choice.take_share() for session in sessions]
        self._timings.end_step(shares, now, is_typical=is_typical)

    def _measure(self, forward: AskedForward, forward_ms: float, *, is_typical: bool) -> None:
        """Counts a forward and its time, and learns from it if that is typical."""
        num_rows = forward.plan.num_rows
        if forward.plan.drawing:
            self.counts.add_forward(forward_ms, num_rows)
        # A drafter that is only tried may slow the forward down: it would seem to be no slower than a plain one.
        if is_typical and not any(session.choice.is_probing for session in self.sessions.values()):
            self._timings.forward_ms.add(forward_ms)
            self._timings.forward_times.observe(num_rows, forward_ms, forward.contexts)


def _logprobs(
    session: VerifySession, logits: Logits, round_: Round, verdict: Verdict, known: TokenLogprobs | None
) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of what a round commits; those of its only draw may be known."""
    if known is not None:
        return (known,)[: len(verdict.token_ids)]
    return round_logprobs(logits, round_, verdict, session.session.spec.report)


def _tell(verdicts: Iterable[_Delivery]) -> None:
    for listener, verdict, statistics, requests in verdicts:
        try:
            listener.on_verdict(verdict, statistics, requests)
        except Exception as error:
            # Those behind it would wait for their verdicts for ever.
            log.exception("engine.verdict_untold")
            listener.on_failure(is_own_fault(error))
