"""The scheduler: decides which sessions share the next forward, and which rows each has in it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from outrider.core.blocks import OutOfBlocks
from outrider.core.costs import HOLD_SHARE
from outrider.core.speculation import MAX_ROWS
from outrider.models.acceptance import Round
from outrider.models.kv_cache import KVCache
from outrider.models.packing import Segment, placeholder
from outrider.models.prefill import PrefillTurns
from outrider.models.residency import Residency
from outrider.rounds.timings import EngineTimings
from outrider.verifier.flight import Batch, Flight, Isolated, round_of
from outrider.verifier.session import Phase, VerifySession

_Rows = tuple[VerifySession, Segment, Round | None]


class Scheduler:
    """Plans the batches of an engine, and makes room for their rows. Owned by the engine's thread."""

    def __init__(
        self,
        residency: Residency[VerifySession],
        timings: EngineTimings,
        isolated: Isolated,
        *,
        prefill_chunk: int,
        max_rows: int,
        vocab_size: int,
    ) -> None:
        """
        Args:
            residency: The sessions that have room, and those that wait for it.
            timings: What all sessions have measured.
            isolated: Ends a session whose rows cannot be made.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward.
            vocab_size: Number of the target's tokens.
        """
        self._residency, self._timings, self._isolated = residency, timings, isolated
        self._prefill_turns: PrefillTurns[VerifySession] = PrefillTurns(prefill_chunk)
        self._max_rows, self._vocab_size = max_rows, vocab_size
        self.wait_s: float | None = None
        """After `next` has returned None: seconds until a session's round begins even if nothing comes. None: without
        limit."""

    def next(self, now: float, after: Flight | None = None) -> Batch | None:
        """Plans the next forward.

        Args:
            now: The time, in seconds.
            after: The flight that the device still runs. None: it is idle.

        Returns:
            The batch. None if it has to be planned later: after the verdicts of the flight, when a draft has come, or
            after `wait_s`.
        """
        self.wait_s = None
        # Paused sessions need no deadline: their reader's progress is posted.
        running = [session for session in self._residency.residents if session.phase is not Phase.PAUSED]
        if after is not None:
            ready = self._following(after, running, now)
        else:
            forward_ms = self._timings.forward_ms.get(0.0)
            ready, self.wait_s = ready_sessions(running, now, forward_ms, self._isolated)
        if not ready:
            return None
        rows = self._rows(ready, self._max_num_nodes(len(ready)), after)
        # No rows: all sessions have lost their room to others.
        return _batch(rows, after) if rows else None

    def _following(self, flight: Flight, running: Sequence[VerifySession], now: float) -> Sequence[VerifySession]:
        """Returns the sessions of the batch that is launched while the device runs a flight: all that go on, or none.
        Two batches with a part of the sessions each would read the weights twice."""
        following = []
        for session in running:
            if session not in flight.places:
                if not session.round.is_ready(now):
                    return ()
            elif flight.draws.drawn is None or session in flight.void or not session.can_follow_draw:
                return ()
            elif session.generation.num_wanted <= 1:
                continue  # it ends with the token that is drawn
            following.append(session)
        return following

    def _max_num_nodes(self, num_sessions: int) -> int:
        """Returns the most nodes of a session: all share the rows equally, and one row of each is for its last
        token."""
        max_num_nodes = max(0, self._max_rows // num_sessions - 1)
        self._timings.max_num_nodes.add(min(max_num_nodes, MAX_ROWS))
        return max_num_nodes

    def _rows(self, work: Sequence[VerifySession], max_num_nodes: int, after: Flight | None) -> list[_Rows]:
        """Makes rows, and room for them in the pool, for all sessions that decode and for some prompts.

        Args:
            work: The sessions, the oldest first.
            max_num_nodes: Most nodes of each.
            after: The flight that the device runs. None: it is idle.

        Returns:
            The sessions with rows in the batch, their rows, and how they are drawn for, if they are.
        """
        missing = {session: session.round.num_missing for session in work if session.round.is_prefilling}
        prefill_rows = self._prefill_turns.shares(missing)
        planned: list[_Rows] = []
        round_: Round | None
        # The oldest first: younger ones may lose their room to them.
        for session in work:
            if not self._residency.has(session) or (session in missing and session not in prefill_rows):
                continue
            with self._isolated(session.spec.session_id):
                if after is not None and session in after.places:
                    segment, round_ = _after_draw(session, after)
                else:
                    segment, round_ = self._known_rows(session, prefill_rows.get(session, 0), max_num_nodes)
                if self._residency.reserve(session, len(segment.token_ids)):
                    planned.append((session, segment, round_))
        return planned

    def _known_rows(
        self, session: VerifySession, max_prefill_rows: int, max_num_nodes: int
    ) -> tuple[Segment, Round | None]:
        """Makes a session's rows if the host knows their tokens."""
        segment = session.round.segment(max_prefill_rows, max_num_nodes)
        if session.round.nodes and not self._has_free_room(segment.cache, len(segment.token_ids)):
            # Drafts are dropped first: that costs only the tokens that they would have brought.
            segment = session.round.segment(max_prefill_rows, 0)
        if not 0 <= min(segment.token_ids) <= max(segment.token_ids) < self._vocab_size:
            raise ValueError(f"token ids must be in [0, {self._vocab_size})")  # the whole forward would fail
        return segment, round_of(session) if segment.num_logits > session.round.num_prompt_rows else None

    def _has_free_room(self, cache: KVCache, num_rows: int) -> bool:
        try:
            cache.reserve(cache.length + num_rows, may_evict=False)
        except OutOfBlocks:
            return False
        return True


def ready_sessions(
    sessions: Iterable[VerifySession], now: float, forward_ms: float, isolated: Isolated
) -> tuple[Sequence[VerifySession], float | None]:
    """Returns the sessions whose round begins now.

    Args:
        sessions: Those that may take part.
        now: The time, in seconds, as `VerifySession` is told it.
        forward_ms: Time of a forward, in milliseconds. Rounds that are ready are held for the others for a share of it;
            if all take turns with the draft model, they are held until its drafts are there.
        isolated: Ends a session that cannot choose its rows.

    Returns:
        The sessions, and None; or no session, and how many seconds others are worth waiting for.
    """
    ready: list[VerifySession] = []
    waiting: list[VerifySession] = []
    for session in sessions:
        with isolated(session.spec.session_id):
            (ready if session.round.is_ready(now) else waiting).append(session)
    if not waiting:
        return ready, None
    until = min(session.round.deadline for session in waiting)
    # Sessions that take turns with the draft model begin together: a forward of some would slow the others' drafts
    # down.
    are_in_turns = [each.drafter.takes_turns and not each.round.is_prefilling for each in (*ready, *waiting)]
    if ready and not all(are_in_turns):
        held_since = min(session.round.ready_since or now for session in ready)
        until = min(until, held_since + HOLD_SHARE * forward_ms / 1e3)
        if until <= now:
            return ready, None
    return (), max(0.0, until - now)


def _after_draw(session: VerifySession, flight: Flight) -> tuple[Segment, Round]:
    """Makes a session's row if its token is still to be drawn, in a flight."""
    place = flight.places[session]
    round_ = flight.batch.rounds[place]
    segment = Segment(session.cache, [placeholder(place)], num_logits=1)
    return segment, round_._replace(output_indices=[round_.output_indices[0] + 1])


def _batch(rows: Sequence[_Rows], after: Flight | None) -> Batch:
    # A piece that does not end its prompt has no verdict.
    drawing = [(session, round_) for session, _, round_ in rows if round_ is not None]
    drawn = None if after is None else after.draws.drawn
    return Batch(
        work=[session for session, _, _ in rows],
        segments=[segment for _, segment, _ in rows],
        drawing=[session for session, _ in drawing],
        rounds=[round_ for _, round_ in drawing],
        started=time.perf_counter(),
        drawn=None if drawn is None else drawn.on_device,
    )
