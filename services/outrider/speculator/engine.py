"""The speculator's engine: one thread that grows the trees of all sessions, a packed forward at a time.

Between two forwards it takes in what was posted, so a commit is at most one forward late. It sleeps while no session
has anything to grow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog

from outrider.core.acceptance import decides_by_ratio
from outrider.core.blocks import PrefixScope
from outrider.core.calibration import DraftCalibration, RetrievalCalibration
from outrider.core.departure import PairTimes, is_worth_waiting
from outrider.core.growth import Candidate, Expansion
from outrider.core.retrieval.retriever import TierSource
from outrider.core.speculation import Steering
from outrider.core.tree import Draft, TokenId
from outrider.models.acceptance import DraftDraw, candidates
from outrider.models.adjustments import adjusted
from outrider.models.draws import Best, RowDraws
from outrider.models.engine import EngineThread
from outrider.models.loading import LoadedModel
from outrider.models.prefill import MIN_PREFILL_ROWS, PrefillTurns
from outrider.models.residency import Residency
from outrider.models.runner import Segment
from outrider.models.sampling import Logits, Sampler, ranked
from outrider.speculator.loop_choice import LoopChoice
from outrider.speculator.metrics import DraftCounts
from outrider.speculator.session import DraftSession, DraftSessionSpec

log = structlog.get_logger(__name__)


class DraftListener(Protocol):
    """Receives the drafts of a session. Called on the engine's event loop, or on its thread if it has none; must not
    block."""

    def send(self, draft: Draft) -> None:
        """Takes new nodes."""

    def fail(self) -> None:
        """Learns that the engine could not go on with the session, which is gone."""


class _Drafting(NamedTuple):
    session: DraftSession
    listener: DraftListener


class _Growth(NamedTuple):
    session: DraftSession
    listener: DraftListener
    expansion: Expansion


class _LoopRun(NamedTuple):
    """Reports several steps that were made at once."""

    sessions: Sequence[DraftSession]
    length: int
    started: float
    ended: float
    num_used: int
    """Number of the steps that were worth their time to any session."""


MAX_ROUNDS_LEFT_OUT = 2
"""A draft that has ended is ignored in `_is_worth_waiting` after so many rounds of the other sessions without it."""
WARM_PAUSE_S = 0.0002
"""Pause between two forwards that keep the model warm. Long enough for the event loop to get the interpreter's lock."""


class Engine(EngineThread[_Drafting]):
    """Grows trees. `open`, `commit`, `steer` and `close` may be called from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        prefill_chunk: int = 512,
        keep_warm_s: float = 0.0,
        tiers: TierSource | None = None,
        max_num_sessions: int = 64,
        forward_us: int = 0,
        prefix_scope: PrefixScope = PrefixScope.TENANT,
        loop: asyncio.AbstractEventLoop | None = None,
        host: EngineThread[Any] | None = None,
    ) -> None:
        """
        Args:
            model: The draft model.
            prefill_chunk: Most rows of a prompt in one forward.
            keep_warm_s: How long after the last message the model is kept in the caches; 0 means not at all.
            tiers: Copies of a datastore's tiers, for sessions that retrieve; None means there is no datastore.
            max_num_sessions: Most sessions that have room in the pool at a time; others wait.
            forward_us: Time of a forward of one row; 0 means not measured.
            prefix_scope: The sessions that may find the beginning of a text again, among those with callers that share
                prefixes.
            loop: Event loop on which listeners are called. None means the engine's thread.
            host: The target's engine, where both models share a device; see `EngineThread`.
        """
        super().__init__("speculator-engine", model.runner, loop, host)
        self._event_loop = loop
        self._drafts: list[tuple[DraftListener, Draft]] = []
        """Drafts that have not been handed to their listeners yet."""
        self._loop_choice = LoopChoice()
        self._num_commits_in_turns = 0
        """Commits so far of sessions that take turns with their target."""
        self._times = PairTimes()
        self.forward_us = forward_us
        """Time of a forward of one row, in microseconds; 0 means not measured."""
        model.runner.make_loop()
        self._sampler = Sampler()
        self._max_context_len = model.max_context_len
        self._prefill_turns: PrefillTurns[DraftSession] = PrefillTurns(prefill_chunk)
        self._keep_warm_s = keep_warm_s
        self._prefix_scope = prefix_scope
        self._scratch = self._runner.new_cache()
        # Now, because there may be no room later.
        self._scratch.reserve(1)
        self.residency: Residency[DraftSession] = Residency(model.runner.pool, max_num_sessions)
        """Sessions by age, those with room in the pool and those that wait for it. Others may read its counts."""
        self._tiers = tiers
        self._calibration = RetrievalCalibration()
        # Two calibrations: a token that was drawn is claimed with its own probability, which says less about the target
        # than the probability of a token that was ranked first.
        self._draft_calibrations = {by_ratio: DraftCalibration() for by_ratio in (False, True)}
        self.counts = DraftCounts()
        # Last, because the thread uses everything above.
        self.start()

    def open(self, spec: DraftSessionSpec, listener: DraftListener) -> None:
        """Begins a session."""
        self.begin(spec.session_id, partial(self._open, spec, listener), lambda _: self._call(listener.fail))

    def commit(self, session_id: str, token_ids: Sequence[TokenId], acknowledged_node_id: int = 0) -> None:
        """Appends committed tokens to a session, if it is still there.

        Args:
            session_id: Names the session.
            token_ids: The tokens.
            acknowledged_node_id: Latest node that had arrived at the target before; 0 means unknown.
        """
        self.post(session_id, partial(self._commit, token_ids, acknowledged_node_id))

    def _commit(self, token_ids: Sequence[TokenId], acknowledged_node_id: int, drafting: _Drafting) -> None:
        drafting.session.commit(token_ids, acknowledged_node_id)
        self._num_commits_in_turns += drafting.session.takes_turns
        drafting.session.commit_number = self._num_commits_in_turns
        self.counts.num_commits += 1
        # A commit makes some nodes without a forward: those that the policy had foreseen.
        self._send(*drafting)

    def steer(self, session_id: str, steering: Steering) -> None:
        """Goes on with a session as its caller says, if it is still there."""
        self.post(session_id, lambda drafting: drafting.session.steer(steering))

    def _open(self, spec: DraftSessionSpec, listener: DraftListener) -> _Drafting:
        # By tenant means as the caller says: it knows the tenants.
        cache = self._runner.new_cache(self._prefix_scope.salt(spec.prefix_salt) if spec.prefix_salt else None)
        draft_calibration = self._draft_calibrations[decides_by_ratio(spec.sampling, spec.speculation)]
        session = DraftSession(
            spec,
            cache,
            self._max_context_len,
            self._calibration,
            self._tiers,
            draft_calibration,
            self.counts,
            # Fewer are wanted of a path that is nearly long enough; they are too few to be asked for.
            num_at_once=min(self._runner.loop_lens(spec.speculation.num_speculative_tokens), default=1),
            times=self._times,
        )
        session.commit_number = self._num_commits_in_turns
        self.residency.add(session)
        self.counts.num_opened += 1
        self.counts.num_resyncs += len(spec.committed_token_ids) > spec.num_prompt_tokens
        return _Drafting(session, listener)

    def removed(self, session: _Drafting, *, has_failed: bool) -> None:
        """Gives the session's blocks back, and counts its wasted nodes."""
        self.residency.discard(session.session, has_failed=has_failed)
        self.counts.num_wasted += session.session.tree.num_nodes

    def turn(self, now: float) -> float | None:
        """Grows what sessions want to grow. While none does, a forward now and then keeps the model warm, unless all
        are paused: then the target has chosen to have the machine to itself."""
        # Before anything that may take long: a forward, or an unbounded wait.
        self._deliver()
        for session in self.residency.admit():
            with self.isolated(session.spec.session_id):
                session.enter()
        if work := self._wanted():
            self._grow(work)
            self.step_done()
            self.counts.busy_s += time.perf_counter() - now
            return 0.0
        if now >= self._posted_at + self._keep_warm_s or all(each.session.is_paused for each in self.sessions.values()):
            return None
        # The same single row each time, so that the cache does not grow: only the reading of the weights is wanted.
        self._scratch.truncate(0)
        self._runner.forward([Segment(self._scratch, [0], 1)])
        return WARM_PAUSE_S

    def _wanted(self) -> list[_Growth]:
        """Returns what every session wants to grow."""
        work = []
        for session, listener in list(self.sessions.values()):
            with self.isolated(session.spec.session_id):
                if self.residency.has(session) and (expansion := session.next_expansion()) is not None:
                    work.append(_Growth(session, listener, session.with_phrase(expansion)))
        return work

    def _grow(self, work: list[_Growth]) -> None:
        """Runs one packed forward for all sessions that have something to grow, then sends the messages that it
        completes. On a GPU, chains then grow by several tokens at once."""
        work, segments = self._segments(work)
        length, looped = self._loop(work, segments)
        stepped = [each for number, each in enumerate(zip(work, segments, strict=True)) if number not in looped]
        if stepped:
            self._step([growth for growth, _ in stepped], [segment for _, segment in stepped])
        loop = None
        if looped:
            loop = self._draft([work[number] for number in looped], [segments[number] for number in looped], length)
        is_worth = self._is_worth_waiting()
        if loop is not None:
            self._learn_from(loop, is_worth=is_worth)
        if not is_worth:
            self._end_drafts()
        self._deliver()

    def _step(self, work: Sequence[_Growth], segments: Sequence[Segment]) -> None:
        started = time.perf_counter()
        drawing = [
            (session, expansion)
            for (session, _, expansion), segment in zip(work, segments, strict=True)
            if segment.num_logits
        ]
        indices = [(session, session.output_indices(expansion)) for session, expansion in drawing]
        rows = RowDraws(
            [session.ranking for session, of_session in indices for _ in of_session],
            [index for _, of_session in indices for index in of_session],
        )
        draws = [draw for session, expansion in drawing for draw in session.draws(expansion)]
        ranked_rows = rows.chosen([draw is None for draw in draws])
        logits = self._runner.forward(segments, draws=ranked_rows)
        found = self._candidates(logits, drawing, rows, draws, ranked_rows)
        forward_us = (time.perf_counter() - started) * 1e6
        self.counts.steps.add(forward_us / 1e6)
        # Forwards that read a prompt take longer than the others: their times are not learnt.
        if all(len(segment.token_ids) - segment.num_logits <= MIN_PREFILL_ROWS for segment in segments):
            self._learn_time(work, forward_us)
        row = 0
        for (session, listener, expansion), segment in zip(work, segments, strict=True):
            if not segment.num_logits:  # a piece of a prompt: the expansion itself is still to come
                continue
            children = [row_found[: expansion.num_children] for row_found in found[row : row + segment.num_logits]]
            row += segment.num_logits
            with self.isolated(session.spec.session_id):
                if self.residency.has(session):  # it may have been lost with its structure
                    session.grow(expansion, children, forward_us)
                    session.share_prefix()
                    self._send(session, listener)

    def _learn_time(self, work: Sequence[_Growth], forward_us: float) -> None:
        """Learns the time of a forward that a target waits for. Trees that grow while the target works have more rows,
        so their forwards take longer."""
        if any(session.is_waited_for for session, _, _ in work):
            self._times.draft_us.add(forward_us)

    def _loop(self, work: Sequence[_Growth], segments: Sequence[Segment]) -> tuple[int, list[int]]:
        """Chooses the work that is done by several steps at once. Returns the number of steps and the indices of the
        work. The pool has room for these steps."""
        if not self._runner.has_loop:
            return 0, []
        wanted = {
            number: session.loop_room(expansion)
            for number, (session, _, expansion) in enumerate(work)
            if segments[number].num_logits and segments[number].is_chain
        }
        lengths = self._runner.loop_lens(max(wanted.values(), default=0))
        if not lengths:
            return 0, []
        length = self._loop_choice.choose(lengths)
        pool, looped = self._runner.pool, []
        # Nothing is taken from others: steps may be wasted.
        num_free = pool.blocks.num_free
        for number, most in wanted.items():
            cache, num_rows = segments[number].cache, len(segments[number].token_ids)
            end = cache.length + num_rows + length - 1
            num_new = pool.num_blocks_for(end) - cache.num_blocks
            if most > 1 and num_rows <= MIN_PREFILL_ROWS + 1 and end <= self._max_context_len and num_new <= num_free:
                num_free -= max(0, num_new)
                looped.append(number)
        return length, looped

    def _draft(self, work: Sequence[_Growth], segments: Sequence[Segment], length: int) -> _LoopRun:
        """Grows chains by several steps at once, with the result of single steps: each ends where its session wants no
        more."""
        started = time.perf_counter()
        lengths = [segment.cache.length for segment in segments]
        params = [session.ranking for session, _, _ in work]
        first_indices = [session.output_indices(expansion)[0] for session, _, expansion in work]
        found = self._runner.draft(segments, params, first_indices, length)
        forward_us = (time.perf_counter() - started) * 1e6 / length
        unsettled = [number for number, of_steps in enumerate(found) if of_steps[0] is None]
        for number in unsettled:
            # As if no step had been run.
            segments[number].cache.truncate(lengths[number])
        self.counts.steps.add(forward_us / 1e6, length)
        self._learn_time(work, forward_us)
        num_used = self._grow_chains(work, found, forward_us)
        for segment in segments:
            # Room of steps that were wasted.
            segment.cache.shrink()
        if unsettled:
            self._step([work[number] for number in unsettled], [segments[number] for number in unsettled])
        sessions = [session for session, _, _ in work]
        return _LoopRun(sessions, length, started, started + forward_us * length / 1e6, num_used)

    def _learn_from(self, loop: _LoopRun, *, is_worth: bool) -> None:
        """Learns how long loops should be; `is_worth` as `_is_worth_waiting` says."""
        left = [session for session in loop.sessions if is_worth or not session.is_weighed]
        self._loop_choice.observe(
            loop.length,
            loop.started,
            loop.ended,
            num_used=loop.num_used,
            goes_on=any(map(self._is_looped, left)),
        )

    def _grow_chains(self, work: Sequence[_Growth], found: Sequence[Sequence[Best | None]], forward_us: float) -> int:
        """Grows what several steps have found, one after the other. A chain stops where its session would not have gone
        on with it. Returns how many of the steps were worth their time."""
        chains, num_used, is_worth = list(zip(work, found, strict=True)), 0, True
        for number in range(len(found[0])):
            # Tokens that were found are taken in any case; the flag only makes the next loops shorter.
            is_worth = is_worth and (not self._loop_choice.could_end_at(number) or self._is_worth_waiting())
            chains = [
                (grown, of_steps)
                for growth, of_steps in chains
                if (grown := self._grown(growth, of_steps, number, forward_us)) is not None
            ]
            if not chains:
                break
            if is_worth or not all(growth.session.is_weighed for growth, _ in chains):
                num_used = number + 1
        return num_used

    def _grown(
        self, growth: _Growth, of_steps: Sequence[Best | None], number: int, forward_us: float
    ) -> _Growth | None:
        """Grows what a step has found after the growth of the step before; the first step's goes to the growth itself.
        Returns what has grown. None means that the chain has ended."""
        session, listener, expansion = growth
        best, before = of_steps[number], of_steps[number - 1] if number else None
        if best is None:
            return None
        with self.isolated(session.spec.session_id):
            # Only where this step's row is used: the call counts the row of the token before as run.
            following = expansion if before is None else session.followed(expansion, before[0][0])
            if following is None:
                return None
            num_children, least = following.num_children, following.least_logprob
            candidates = ranked(best, num_children, is_greedy=session.ranking.is_greedy, least_logprob=least)
            session.grow(following, [candidates], forward_us)
            session.share_prefix()
            self._send(session, listener)
            return growth._replace(expansion=following)
        return None

    def _is_worth_waiting(self) -> bool:
        """Returns True if another forward is worth the time of the target, which waits for it; also if no session is
        weighed."""
        sessions = [session for session, _ in self.sessions.values() if self.residency.has(session)]
        if not any(session.is_weighed for session in sessions):
            return True
        # The target waits for some drafts in any case.
        for session in sessions:
            if session.takes_turns and not session.is_weighed and session.next_expansion() is not None:
                return True
        # Sessions that take turns commit once a round. A session is left out if its draft has ended and several rounds
        # went by without it: it does not wait for the others, its reader is slow.
        oldest = self._num_commits_in_turns - MAX_ROUNDS_LEFT_OUT * len(sessions)
        waiting = [each for each in sessions if each.commit_number >= oldest or each.next_expansion() is not None]
        drafts = [draft for draft in (session.awaited_draft() for session in waiting) if draft is not None]
        return not drafts or is_worth_waiting(drafts, self._times.draft_us.get(0.0))

    def _end_drafts(self) -> None:
        """Ends the drafts that may end anywhere: another forward is not worth the target's time."""
        for session, listener in self.sessions.values():
            if session.awaited_draft() is not None:
                session.end_draft()
                self._send(session, listener)

    def _is_looped(self, session: DraftSession) -> bool:
        """Returns True if a session's next steps are made at once as well."""
        following = session.next_expansion()
        return following is not None and bool(self._runner.loop_lens(session.loop_room(following)))

    def _candidates(
        self,
        logits: Logits,
        drawing: Sequence[tuple[DraftSession, Expansion]],
        rows: RowDraws,
        draws: Sequence[DraftDraw | None],
        ranked_rows: RowDraws,
    ) -> list[list[Candidate]]:
        """Returns candidates for each row: what the target would draw there under all parameters of the request.

        Args:
            logits: float32 [rows, vocab].
            drawing: Sessions, and what of them grows.
            rows: How the target would draw from each row.
            draws: How the draft model draws from each row; None means that it ranks what the target would draw.
            ranked_rows: Those of `rows` that it ranks, as the forward was told of them.
        """
        with adjusted(logits, [each for session, expansion in drawing for each in session.adjustments(expansion)]):
            first_row = 0
            for session, expansion in drawing:
                num_rows = len(expansion.nodes) + len(expansion.phrase)
                with self.isolated(session.spec.session_id):
                    session.keep_to_structure(expansion, logits[first_row : first_row + num_rows])
                first_row += num_rows
            return candidates(
                self._sampler,
                logits,
                rows.params,
                rows.output_indices,
                draws,
                # Every row gets as many as the widest wants; the others are cut later. While all sessions read their
                # prompts, no row wants any.
                max((expansion.num_children for _, expansion in drawing), default=1),
                [session.has_raw_scores for session, expansion in drawing for _ in session.output_indices(expansion)],
                ranked_rows,
            )

    def _segments(self, work: list[_Growth]) -> tuple[list[_Growth], list[Segment]]:
        """Returns the rows of a step, and makes room for them in the pool."""
        chosen, segments = [], []
        missing = {session: session.num_missing for session, _, _ in work if session.is_prefilling}
        prefill_rows = self._prefill_turns.shares(missing)
        # The oldest first: younger ones may lose their room to them.
        for growth in work:
            session = growth.session
            if self.residency.has(session) and (session in prefill_rows or not session.is_prefilling):
                with self.isolated(session.spec.session_id):
                    segment = session.segment(growth.expansion, prefill_rows.get(session, MIN_PREFILL_ROWS))
                    if not 0 <= min(segment.token_ids) <= max(segment.token_ids) < self._runner.vocab_size:
                        raise ValueError(f"token ids must be in [0, {self._runner.vocab_size})")
                    if self.residency.reserve(session, len(segment.token_ids)):
                        chosen.append(growth)
                        segments.append(segment)
        # Without its keys and values a tree cannot go on: the caller opens the session again, and waits for room.
        for session_id, (session, listener) in list(self.sessions.items()):
            if session.has_begun and not self.residency.has(session):
                log.info("engine.preempted", session_id=session_id)
                self.remove(session_id)
                self._call(listener.fail)
        return chosen, segments

    def _send(self, session: DraftSession, listener: DraftListener) -> None:
        """Queues a session's nodes for sending, if they are worth a message."""
        draft = session.take_message(is_idle=session.next_expansion() is None)
        if draft is None:
            return
        self.counts.num_messages += 1
        self.counts.num_sent += len(draft.token_ids)
        self.counts.retrieval_s += draft.retrieval_us / 1e6
        self._drafts.append((listener, draft))

    def _deliver(self) -> None:
        """Hands the queued drafts of all sessions to their listeners."""
        if self._drafts:
            drafts, self._drafts = self._drafts, []
            # One call for all of them: each one would write to the pipe that wakes the loop.
            self._call(partial(_send_all, drafts))

    def _call(self, action: Callable[[], object]) -> None:
        """Calls an action on the listeners' event loop, or here if there is none."""
        if self._event_loop is None:
            action()
        else:
            self._event_loop.call_soon_threadsafe(action)


def _send_all(drafts: Sequence[tuple[DraftListener, Draft]]) -> None:
    for listener, draft in drafts:
        try:
            listener.send(draft)
        except Exception:
            log.exception("engine.draft_unsent")
            listener.fail()
