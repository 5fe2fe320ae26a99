"""The plans of forwards: whose rows are in one, and which a device can be asked for while it is still at another."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.core.blocks import OutOfBlocks
from outrider.core.params import MAX_ROWS
from outrider.models.kv_cache import KVCache
from outrider.models.packing import Segment
from outrider.models.pending_draft import PendingDraft
from outrider.models.prefill import PrefillTurns
from outrider.models.ratio import Round
from outrider.models.residency import Residency
from outrider.verifier.micro_batches import MicroBatches
from outrider.verifier.rounds_behind_drafts import RoundsBehindDrafts
from outrider.verifier.session import VerifySession
from outrider.verifier.shared_forward import AskedForward, Isolated, PlannedForward, ready_sessions, round_of
from outrider.verifier.timings import EngineTimings


class ForwardPlanner:
    """Plans the forwards that sessions share, and makes room for their rows. Owned by the engine's thread."""

    def __init__(
        self,
        residency: Residency[VerifySession],
        timings: EngineTimings,
        micro_batches: MicroBatches,
        behind_drafts: RoundsBehindDrafts,
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
            micro_batches: Decides when a batch is verified in two halves.
            behind_drafts: Chooses the rows behind a draft that the device is still at.
            isolated: Loses a session whose rows cannot be made.
            prefill_chunk: Most prompt rows of one forward, over all sessions.
            max_rows: Most decode rows of one forward.
            vocab_size: Number of the target's tokens.
        """
        self._residency = residency
        self._timings = timings
        self._micro_batches = micro_batches
        self._behind_drafts = behind_drafts
        self._isolated = isolated
        self._prefill_turns: PrefillTurns[VerifySession] = PrefillTurns(prefill_chunk)
        self._max_rows = max_rows
        self._vocab_size = vocab_size

    def plan(self, work: Sequence[VerifySession], *, may_halve: bool) -> PlannedForward | None:
        """Plans the forward of a step.

        Args:
            work: Sessions whose round begins now, the oldest first.
            may_halve: True for a device that can be asked for a forward while it is at another one: a half of the
                sessions may come first then.

        Returns:
            The forward. None if all of them have lost their room to others.
        """
        started = time.perf_counter()
        max_num_nodes = self._max_num_nodes(len(work))
        first = self._micro_batches.first_of(work, max_num_nodes) if may_halve else work
        return self._planned(first, max_num_nodes, started)

    def plan_ahead(self, forward: AskedForward) -> PlannedForward | None:
        """Plans the forward behind one that the device is still at, if that is known to be of its sessions alone: their
        tokens go on from where they are drawn, and the host does all that it has to do meanwhile. A session that ends
        by its token has a row in vain.

        Args:
            forward: None of its draws is known, and none of its verdicts made yet.

        Returns:
            The next forward. None where it has to be planned behind the verdicts.
        """
        drawn, drawing = forward.draws.drawn, forward.plan.drawing
        if drawn is None or any(len(each.output_indices) > 1 for each in forward.plan.rounds):
            return None
        sharing = {session for session in self._residency.residents if not session.is_paused}
        if not sharing.issubset(drawing) or not sharing.isdisjoint(forward.void):
            return None
        going, segments, rounds = [], [], []
        for place, (session, round_) in enumerate(zip(drawing, forward.plan.rounds, strict=True)):
            if session not in sharing:
                continue
            generation = session.session
            # What came since this round was asked for may have changed its strategy.
            if not (generation.is_as_drawn and session.choice.goes_on_plain):
                return None
            # What is read of these logits behind the verdict would be waited for behind the next ones.
            report = generation.spec.report
            if session.num_prompt_rows or (report.logprobs is not None and report.logprobs_mode.is_processed):
                return None
            if generation.num_wanted <= 1:
                continue
            segment = Segment(session.cache, [place], 1)
            if not self._has_free_room(segment.cache, len(segment.token_ids)):
                return None
            going.append(session)
            segments.append(segment)
            rounds.append(round_._replace(output_indices=[round_.output_indices[0] + 1]))
        if not going:
            return None
        return PlannedForward(going, segments, going, rounds, time.perf_counter(), drawn.on_device)

    def plan_of_others(self, forward: AskedForward) -> PlannedForward | None:
        """Plans the forward of all sessions that are not in the one that the device is at, if they are ready and that
        pays: while it is at theirs, the host works for those of this one (`outrider.verifier.micro_batches`).

        Returns:
            The next forward. None where all are planned together.
        """
        in_forward = set(forward.plan.work)
        running = [session for session in forward.plan.work if self._residency.has(session)]
        others = [each for each in self._residency.residents if each not in in_forward and not each.is_paused]
        if not others or not self._micro_batches.may_go_on([*running, *others]):
            return None
        started, ready_since = time.perf_counter(), [session.ready_since for session in others]
        ready, _ = ready_sessions(others, started, self._timings.forward_ms.get(0.0), self._isolated)
        max_num_nodes = self._max_num_nodes(len(running) + len(others))
        if len(ready) < len(others) or not self._micro_batches.go_on(running, ready, max_num_nodes):
            for session, since in zip(others, ready_since, strict=True):
                session.ready_since = since  # nothing could have begun yet that they were held back from
            return None
        # Who loses room to them, though its forward is running, gets no verdict, and reads its text again.
        planned = self._planned(ready, max_num_nodes, started)
        return None if planned is None else planned._replace(num_rows_of_others=forward.plan.num_rows)

    def plan_behind(self, draft: PendingDraft, running: Sequence[VerifySession]) -> PlannedForward | None:
        """Plans the round behind a draft that the device is still at (`outrider.verifier.rounds_behind_drafts`), and
        claims the draft for it.

        Args:
            draft: The draft.
            running: All sessions that share forwards; at least one.

        Returns:
            The forward. None where the draft is waited for.
        """
        behind = self._behind_drafts.plan(draft, running, self._max_num_nodes(len(running)))
        # Nothing is taken from others: then the draft is told of as any other.
        if behind is None or not all(
            self._has_free_room(each.cache, 1 + its.num_nodes) for each, its in behind.rows.items()
        ):
            return None
        if not draft.claim():
            return None
        started = time.perf_counter()
        segments = behind.begin(started)
        rounds, tokens = [round_of(session) for session in running], behind.tokens(self._vocab_size)
        return PlannedForward(running, segments, running, rounds, started, tokens, behind)

    def _max_num_nodes(self, num_sessions: int) -> int:
        """Returns the most nodes of a session: all share the rows equally, and one of each is for its last token."""
        max_num_nodes = max(0, self._max_rows // num_sessions - 1)
        self._timings.max_num_nodes.add(min(max_num_nodes, MAX_ROWS))
        return max_num_nodes

    def _planned(self, ready: Sequence[VerifySession], max_num_nodes: int, started: float) -> PlannedForward | None:
        """Plans the forward of some sessions whose rows are known.

        Args:
            ready: Sessions whose round begins now, the oldest first.
            max_num_nodes: Most nodes of each.
            started: Time at which the step began.

        Returns:
            The forward. None if all of them have lost their room to others.
        """
        planned = self._rows_of(ready, max_num_nodes)
        if not planned:
            return None
        # Without a verdict are the pieces of prompts that are not through.
        drawn = [(session, round_) for session, _, round_ in planned if round_ is not None]
        return PlannedForward(
            work=[session for session, _, _ in planned],
            segments=[segment for _, segment, _ in planned],
            drawing=[session for session, _ in drawn],
            rounds=[round_ for _, round_ in drawn],
            started=started,
        )

    def _rows_of(
        self, work: Sequence[VerifySession], max_num_nodes: int
    ) -> list[tuple[VerifySession, Segment, Round | None]]:
        """Makes the rows of a step, and room for them in the pool: of all sessions that decode, and of some prompts.

        Args:
            work: The sessions, the oldest first.
            max_num_nodes: Most nodes of each.

        Returns:
            Those that have rows in it, their rows, and how they are drawn for, if they are.
        """
        missing = {session: session.num_missing for session in work if session.is_prefilling}
        prefill_rows = self._prefill_turns.shares(missing)
        planned = []
        # The oldest first: younger ones may lose their room to them.
        for session in work:
            if session not in missing or session in prefill_rows:
                with self._isolated(session.session.spec.session_id):
                    segment = self._segment(session, prefill_rows.get(session, 0), max_num_nodes)
                    if segment is not None:
                        is_drawn = segment.num_logits > session.num_prompt_rows
                        planned.append((session, segment, round_of(session) if is_drawn else None))
        return planned

    def _segment(self, session: VerifySession, max_prefill_rows: int, max_num_nodes: int) -> Segment | None:
        """Makes a session's rows and room for them; None if it has lost its room."""
        if not self._residency.has(session):
            return None  # an older one has needed it, in this step
        segment = session.segment(max_prefill_rows, max_num_nodes)
        if session.nodes and not self._has_free_room(segment.cache, len(segment.token_ids)):
            # Drafts are the first that go: they cost nobody anything but the tokens that they would have brought.
            segment = session.segment(max_prefill_rows, 0)
        if not 0 <= min(segment.token_ids) <= max(segment.token_ids) < self._vocab_size:
            raise ValueError(f"token ids must be in [0, {self._vocab_size})")  # the whole forward would fail
        return segment if self._residency.reserve(session, len(segment.token_ids)) else None

    def _has_free_room(self, cache: KVCache, num_rows: int) -> bool:
        try:
            cache.reserve(cache.length + num_rows, may_evict=False)
        except OutOfBlocks:
            return False
        return True
