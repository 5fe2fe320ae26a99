"""The speculator's engine: one thread that grows the trees of all sessions, a packed forward at a time.

The thread owns every session. Others post to its inbox; between two forwards it takes everything in, so a commit is
at most one forward late. It sleeps while no session has anything to grow.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import structlog

from outrider.core.acceptance import decides_by_ratio
from outrider.core.calibration import DraftCalibration, RetrievalCalibration
from outrider.core.drafting.policy import Expansion
from outrider.core.params import SpeculationParams, Steering
from outrider.core.retrieval.retriever import TierSource
from outrider.core.tree import Draft, DraftCost, TokenId
from outrider.models.engine import Fitness
from outrider.models.loading import LoadedModel
from outrider.models.ratio import candidates
from outrider.models.runner import Segment
from outrider.models.sampling import Sampler
from outrider.speculator.metrics import DraftCounts
from outrider.speculator.session import DraftSession, DraftSessionSpec

log = structlog.get_logger(__name__)


class DraftListener(Protocol):
    """Where a session's drafts go. Called on the engine's thread; must not block."""

    def send(self, draft: Draft, cost: DraftCost) -> None:
        """New nodes, and what they have cost."""

    def fail(self) -> None:
        """The session is gone: the engine could not go on with it."""


@dataclass(frozen=True, slots=True)
class _Open:
    spec: DraftSessionSpec
    sink: DraftListener


@dataclass(frozen=True, slots=True)
class _Commit:
    session_id: str
    token_ids: tuple[TokenId, ...]
    acknowledged_node_id: int


@dataclass(frozen=True, slots=True)
class _Close:
    session_id: str


@dataclass(frozen=True, slots=True)
class _Steer:
    session_id: str
    steering: Steering


_Work = tuple[DraftSession, DraftListener, Expansion]

WARM_PAUSE_S = 0.0002
"""Between two forwards that keep the model warm: enough for the event loop to run."""


class Engine:
    """Grows trees. `open`, `commit` and `close` may be called from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        prefill_chunk: int = 512,
        keep_warm_s: float = 0.0,
        tiers: TierSource | None = None,
    ) -> None:
        """
        Args:
            model: The draft model.
            prefill_chunk: Most rows of a prompt in one forward.
            keep_warm_s: How long after the last message the model is kept in the caches; 0 = not at all.
            tiers: Copies of a datastore's tiers, for sessions that retrieve; None = there is no datastore.
        """
        self._runner = model.runner
        self._sampler = Sampler()
        self._max_context_len = model.max_context_len
        self._prefill_chunk = prefill_chunk
        self._keep_warm_s = keep_warm_s
        self._keep_warm_until = 0.0
        self._scratch = self._runner.new_cache(1)
        self._tiers = tiers
        self._calibration = RetrievalCalibration()
        # What is drawn is claimed with its own probability, which says less than that of a token that is ranked first.
        self._claims = {by_ratio: DraftCalibration() for by_ratio in (False, True)}
        self.counts = DraftCounts()
        self._inbox: queue.SimpleQueue[_Open | _Commit | _Close | _Steer | None] = queue.SimpleQueue()
        self._sessions: dict[str, tuple[DraftSession, DraftListener]] = {}
        self._fitness = Fitness(model.runner)
        self._thread = threading.Thread(target=self._run, name="speculator-engine", daemon=True)
        self._thread.start()

    def open(self, spec: DraftSessionSpec, sink: DraftListener) -> None:
        """Begins a session."""
        self._inbox.put(_Open(spec, sink))

    def commit(self, session_id: str, token_ids: tuple[TokenId, ...], acknowledged_node_id: int = 0) -> None:
        """Appends committed tokens, and says which node was the latest to arrive before (0 = unknown). For a session
        that is gone: nothing."""
        self._inbox.put(_Commit(session_id, token_ids, acknowledged_node_id))

    def steer(
        self, session_id: str, speculation: SpeculationParams | None, forward_us: int, round_trip_us: int
    ) -> None:
        """Goes on with a session as its caller says (`outrider.core.params`). For one that is gone: nothing."""
        self._inbox.put(_Steer(session_id, Steering(speculation, forward_us, round_trip_us)))

    def close(self, session_id: str) -> None:
        """Ends a session."""
        self._inbox.put(_Close(session_id))

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values right now."""
        return len(self._sessions)

    def fault(self) -> str:
        """Why nothing can be drafted here any more; empty = it can."""
        return self._fitness.fault(self._thread)

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        work: list[_Work] = []
        while self._take_inbox(0.0 if work else self._patience_s()):
            began = time.perf_counter()
            try:
                work = self._next_work()
                if work:
                    self._step(work)
                    self.counts.busy_s += time.perf_counter() - began
                    self._fitness.succeeded()
                elif self._patience_s() is not None:
                    self._warm()
            except Exception:
                log.exception("engine.step_failed", num_sessions=len(self._sessions))
                for session_id, (_, sink) in list(self._sessions.items()):
                    sink.fail()
                    self._drop(session_id)
                self._fitness.failed()

    def _patience_s(self) -> float | None:
        """How long to wait for a message when there is nothing to grow; None = for ever."""
        is_warm = self._sessions and time.perf_counter() < self._keep_warm_until
        return WARM_PAUSE_S if is_warm else None

    def _warm(self) -> None:
        self._scratch.truncate(0)
        self._runner.forward([Segment(self._scratch, [0], 1)])

    def _take_inbox(self, timeout_s: float | None) -> bool:
        """Applies what was posted; waits at most timeout_s for something (None = for ever). False = the engine ends.

        What is posted meanwhile waits for the next time: whoever posts without end would keep all trees from growing.
        """
        try:
            messages = [self._inbox.get(block=timeout_s != 0, timeout=timeout_s)]
        except queue.Empty:
            return True
        messages += [self._inbox.get(block=False) for _ in range(self._inbox.qsize())]
        self._keep_warm_until = time.perf_counter() + self._keep_warm_s
        for message in messages:
            if message is None:
                return False
            self._apply(message)
        return True

    def _apply(self, message: _Open | _Commit | _Close | _Steer) -> None:
        if isinstance(message, _Close):
            self._drop(message.session_id)
            return
        if isinstance(message, _Open):
            session_id, sink = message.spec.session_id, message.sink
        elif message.session_id in self._sessions:
            session_id, sink = message.session_id, self._sessions[message.session_id][1]
        else:
            return
        try:
            if isinstance(message, _Open):
                self._open(message)
            else:
                self._tell(message, *self._sessions[session_id])
        except Exception:
            # What came in for one session is no reason to lose the others.
            log.exception("engine.session_failed", session_id=session_id)
            self._drop(session_id)
            sink.fail()

    def _open(self, message: _Open) -> None:
        cache = self._runner.new_cache(len(message.spec.committed_token_ids) + 64)
        claims = self._claims[decides_by_ratio(message.spec.sampling, message.spec.speculation)]
        drafting = DraftSession(
            message.spec, cache, self._max_context_len, self._calibration, self._tiers, claims, self.counts
        )
        self._sessions[message.spec.session_id] = (drafting, message.sink)
        self.counts.num_opened += 1
        self.counts.num_resyncs += len(message.spec.committed_token_ids) > message.spec.num_prompt_tokens

    def _drop(self, session_id: str) -> None:
        """Forgets a session, if it is there."""
        drafting, _ = self._sessions.pop(session_id, (None, None))
        if drafting is not None:
            self.counts.num_wasted += drafting.tree.num_nodes

    def _tell(self, message: _Commit | _Steer, drafting: DraftSession, sink: DraftListener) -> None:
        if isinstance(message, _Steer):
            drafting.steer(message.steering)
        else:
            drafting.commit(message.token_ids, message.acknowledged_node_id)
            self.counts.num_commits += 1
            # What a commit makes into nodes without a forward.
            self._send(drafting, sink)

    def _next_work(self) -> list[_Work]:
        work = []
        for drafting, sink in self._sessions.values():
            expansion = drafting.next_expansion()
            if expansion is not None:
                work.append((drafting, sink, drafting.with_phrase(expansion)))
        return work

    def _step(self, work: list[_Work]) -> None:
        """One packed forward for all sessions that have something to grow, then the messages that it completes."""
        started = time.perf_counter()
        segments = [drafting.segment(expansion, self._prefill_chunk) for drafting, _, expansion in work]
        logits = self._runner.forward(segments)
        drawing = [
            (drafting, expansion)
            for (drafting, _, expansion), segment in zip(work, segments, strict=True)
            if segment.num_logits
        ]
        found = candidates(
            self._sampler,
            logits,
            [drafting.ranking for drafting, expansion in drawing for _ in drafting.output_indices(expansion)],
            [index for drafting, expansion in drawing for index in drafting.output_indices(expansion)],
            [draw for drafting, expansion in drawing for draw in drafting.draws(expansion)],
            max((expansion.num_children for _, expansion in drawing), default=1),
        )
        forward_us = (time.perf_counter() - started) * 1e6
        self.counts.steps.add(forward_us / 1e6)
        row = 0
        for (drafting, sink, expansion), segment in zip(work, segments, strict=True):
            if not segment.num_logits:
                continue
            children = [row_found[: expansion.num_children] for row_found in found[row : row + segment.num_logits]]
            row += segment.num_logits
            drafting.grow(expansion, children, forward_us)
            self._send(drafting, sink)

    def _send(self, drafting: DraftSession, sink: DraftListener) -> None:
        """Sends the nodes that are worth a message."""
        message = drafting.take_message(is_idle=drafting.next_expansion() is None)
        if message is None:
            return
        draft, cost = message
        self.counts.num_messages += 1
        self.counts.num_sent += len(draft.token_ids)
        self.counts.retrieval_s += cost.retrieval_us / 1e6
        sink.send(draft, cost)
