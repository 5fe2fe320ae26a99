"""The draft model in the verifier's own process: an engine next to the target's, with a runner and a pool of its own.

A generation uses it like a remote speculator. Commits and drafts pass from engine to engine directly, without messages
and without the event loop; if both models share a GPU, both engines take turns on one thread. If its engine loses a
session, the text goes on without drafts, and drafts come again as soon as the engine accepts the session.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from outrider.core.speculation import Steering
from outrider.core.statistics import Absence, Traffic
from outrider.core.tree import Draft, TokenId
from outrider.models.loading import CannotLoadModel, LoadedModel, Weights, load_for, read_weights
from outrider.models.timing import forward_us_of
from outrider.peers.channel import PeerState
from outrider.peers.fleet import SpeculatorState, read_speculators
from outrider.peers.reconnecting import FIRST_RETRY_S
from outrider.peers.speculator import (
    MAX_PAUSED_TOKENS,
    REFUSED_RETRY_S,
    SpeculationListener,
    SpeculationSpec,
)
from outrider.speculator.drafter import Drafter, check_fits
from outrider.speculator.load import EngineUse
from outrider.speculator.metrics import read_drafts
from outrider.speculator.tracing import drafting_attributes
from outrider.telemetry.metrics import Metrics, counter
from outrider.telemetry.tracing import NO_SPAN, SPECULATE, current_span
from outrider.v1 import verifier_pb2
from outrider.verifier.engine import Engine
from outrider.verifier.session import VerifySession
from outrider.verifier.settings import DraftFlags
from outrider.wire.channels import doubled
from outrider.wire.errors import OutOfRange

log = structlog.get_logger(__name__)

ADDRESS = "in-process"
"""Used in reports in place of a speculator's address."""


def load_draft_model(flags: DraftFlags, weights: Weights | None = None) -> tuple[LoadedModel, int]:
    """Loads the draft model of a verifier. Takes seconds, and belongs in a thread.

    Args:
        flags: Settings of the draft model.
        weights: What `read_draft_weights` has read. None means that they are read here.

    Returns:
        The model, and the time of a forward of one row in microseconds.

    Raises:
        CannotLoadModel: See `load_for`.
    """
    with _named_by_draft_flags():
        model = load_for(flags, weights)
    model.runner.make_loop()
    return model, forward_us_of(model.runner)


def read_draft_weights(flags: DraftFlags) -> Weights:
    """Reads the weights of the draft model to its device. Raises CannotLoadModel, see `load_for`."""
    with _named_by_draft_flags():
        return read_weights(flags)


@contextmanager
def _named_by_draft_flags() -> Iterator[None]:
    try:
        yield
    except CannotLoadModel as error:
        raise CannotLoadModel(re.sub(r"--(model|device|kv-cache-tokens)\b", r"--draft-\1", str(error))) from error


def check_tokenizer(model: LoadedModel, target: LoadedModel) -> None:
    """Raises CannotLoadModel if the token ids of a draft model mean other tokens than those of the target."""
    if model.tokenizer_hash != target.tokenizer_hash:
        raise CannotLoadModel(
            f"--draft-model {model.model_id}: its tokenizer must be that of --model {target.model_id}: the token ids "
            "of the two models do not mean the same"
        )


class InProcessSpeculator:
    """Drafts for a verifier's sessions on an engine of its own process. Lives on the event loop."""

    def __init__(
        self, make_drafter: Callable[[], Drafter], target: Engine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            make_drafter: Starts an engine: one now, and a new one whenever the last has ended.
            target: The engine whose sessions are drafted for.
            clock: Returns the time in seconds.
        """
        self._make_drafter = make_drafter
        self._drafter = make_drafter()
        self.target = target
        self._use = EngineUse(clock)
        self._sessions: set[InProcessSession] = set()
        self.num_restarts = 0
        """Engines that were started because the previous one had ended."""

    @property
    def drafter(self) -> Drafter:
        """The engine that sessions are opened on."""
        if self._drafter.has_ended:
            # The garbage collector frees what the old engine held in the pool.
            self._drafter = self._make_drafter()
            self.num_restarts += 1
            log.error("speculator.restarted", reason="the engine's thread has ended")
        return self._drafter

    def speculate(
        self, spec: SpeculationSpec, committed: Sequence[TokenId], listener: SpeculationListener
    ) -> InProcessSession:
        """See `outrider.peers.speculator.Speculators`."""
        session = InProcessSession(self, spec, committed, listener)
        self._sessions.add(session)
        return session

    def forget(self, session: InProcessSession) -> None:
        """Takes in that a session is over."""
        self._sessions.discard(session)

    @property
    def states(self) -> list[PeerState]:
        """Returns nothing: it is not dialled."""
        return []

    def infos(self) -> list[verifier_pb2.PeerInfo]:
        """Describes it as a speculator for a caller of the verifier."""
        drafter, num_sessions = self._drafter, len(self._sessions)
        fault = drafter.fault()
        return [
            verifier_pb2.PeerInfo(
                address=ADDRESS,
                connected=not fault,
                last_error=fault,
                num_own_sessions=num_sessions,
                num_sessions=num_sessions,
                max_num_sessions=drafter.max_num_sessions,
                busy_percent=self._use.percent(drafter.counts.busy_s),
            )
        ]

    def metrics(self) -> Metrics:
        """Yields what its engine has counted, and whether it works. Safe to call in any thread."""
        drafter = self._drafter
        num_sessions, busy = len(self._sessions), self._use.percent(drafter.counts.busy_s) / 100
        yield from read_speculators({ADDRESS: SpeculatorState(not drafter.fault(), num_sessions, num_sessions, busy)})
        yield counter(
            "outrider_speculator_restarts_total",
            "Engines of the draft model in this process that were started because the one before had ended.",
            self.num_restarts,
        )
        yield from read_drafts(drafter.counts, drafter.num_sessions, drafter.pool_state(), "outrider_draft_")

    async def close(self) -> None:
        """Ends the engine's thread."""
        # In a thread: it waits for the forward that is running.
        await asyncio.to_thread(self._drafter.stop)


class _Opening:
    """One opening of a session at the draft model's engine: passes commits and drafts between the two engines.

    `commit` is called on the target's thread, `send` and `fail` on the draft model's.
    """

    def __init__(self, session: InProcessSession, drafter: Drafter, session_id: str, num_committed: int) -> None:
        self.session_id = session_id
        self.num_sent = num_committed
        """Committed tokens that the engine has been sent."""
        self.num_drafts = self.num_nodes = 0
        """Drafts that have arrived, and the nodes in them."""
        self.is_paused = False
        """Set while the drafter should pause. Commits are joined meanwhile: each would wake its thread for nothing."""
        self._session, self._drafter = session, drafter
        self._last_node_id = 0
        self._is_over = False

    def commit(self, committed: Sequence[TokenId]) -> None:
        """Tells the engine of the tokens that were added to the committed ones."""
        num_fresh = len(committed) - self.num_sent
        if self._is_over or not num_fresh or (self.is_paused and num_fresh < MAX_PAUSED_TOKENS):
            return
        if self._drafter.has_ended:
            self.fail()  # it cannot say so itself any more
            return
        try:
            check_fits(len(committed), self._drafter.model, "committed tokens")
        except OutOfRange as error:
            self._is_over = True
            self._session.call(partial(self._session.give_up, self, error))
            return
        self._drafter.commit(self.session_id, committed[self.num_sent :], self._last_node_id)
        self.num_sent = len(committed)

    def send(self, draft: Draft) -> None:
        """See `DraftListener`."""
        if not self._is_over:
            self.num_drafts += 1
            self.num_nodes += len(draft.token_ids)
            self._last_node_id = draft.first_node_id + len(draft.token_ids) - 1
            self._session.on_draft(draft)

    def fail(self) -> None:
        """See `DraftListener`."""
        self._is_over = True
        self._session.call(partial(self._session.on_failure, self))

    def end(self) -> None:
        """Ends it on the engine."""
        self._is_over = True
        self._drafter.close(self.session_id)


class InProcessSession:
    """Drafts for one session. Lives on the event loop, except for `on_draft`."""

    def __init__(
        self,
        speculator: InProcessSpeculator,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
    ) -> None:
        """See `InProcessSpeculator.speculate`."""
        self.traffic = Traffic()
        """Stays at 0: nothing is sent."""
        self._speculator, self._spec, self._committed, self._listener = speculator, spec, committed, listener
        self._loop = asyncio.get_running_loop()
        self._steering = Steering()
        self._num_openings = 0
        # Read now: later calls that open it, and those of the engine, do not have the generation's trace.
        self._session_span, self._span = current_span(), NO_SPAN
        self._num_failures = 0
        """Openings that were lost since the last draft."""
        self._is_attached = True
        """True until the listener is told otherwise: a session begins expecting drafts."""
        self._opening: _Opening | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._open()

    def send_commit(self) -> None:
        """Does nothing: the target's engine has told the draft model's already."""

    def send_steering(self, steering: Steering) -> None:
        """Tells the engine of measurements and decisions. Fields that are not set keep their last value."""
        was_paused, self._steering = self._steering.is_pause, self._steering.then(steering)
        if (opening := self._opening) is not None:
            opening.is_paused = self._steering.is_pause
            self._speculator.drafter.steer(opening.session_id, steering)
            if was_paused:  # sends the commits that the pause has held back
                self._post(lambda session: opening.commit(session.generation.committed))

    def close(self) -> None:
        """Ends the session on the engine. Idempotent."""
        self._speculator.forget(self)
        self._drop()
        if self._retry is not None:
            self._retry.cancel()

    def on_draft(self, draft: Draft) -> None:
        """Takes in new nodes, on the draft model's thread."""
        self._num_failures = 0
        self._listener.on_draft(draft)

    def on_failure(self, opening: _Opening) -> None:
        """Opens the session again after a pause: the engine has lost it."""
        if opening is not self._opening:
            return
        self._drop("UNAVAILABLE", is_error=True)
        self._detach(Absence.LOST)
        self._retry = self._loop.call_later(doubled(FIRST_RETRY_S, REFUSED_RETRY_S, self._num_failures), self._open)
        self._num_failures += 1

    def call(self, action: Callable[[], object]) -> None:
        """Has the event loop call this. May be called in any thread."""
        self._loop.call_soon_threadsafe(action)

    def _post(self, action: Callable[[VerifySession], object]) -> None:
        self._speculator.target.post(self._spec.session_id, action)

    def _open(self) -> None:
        spec, drafter = self._spec, self._speculator.drafter
        self._num_openings += 1
        # Each opening is a session of its own at the engine, which may still send drafts of the last one.
        opening = _Opening(self, drafter, f"{spec.session_id}/{self._num_openings}", len(self._committed))
        forward_us = drafter.forward_us
        self._opening = opening
        try:
            drafter.open(
                opening.session_id,
                self._committed,
                spec.num_prompt_tokens,
                spec.sampling,
                spec.speculation,
                opening,
                spec.structure,
                prefix_salt=spec.prefix_salt,
                begins_paused=0 < spec.max_forward_us < forward_us,
            )
        except OutOfRange as error:
            self.give_up(opening, error)
            return
        self._span = self._session_span.child(SPECULATE)
        opening.is_paused = self._steering.is_pause
        if self._steering != Steering():
            drafter.steer(opening.session_id, self._steering)
        self._is_attached = True
        self._listener.on_attached(forward_us)

        def follow(session: VerifySession) -> None:
            session.take_commits = opening.commit
            opening.commit(session.generation.committed)  # sends what was committed since it was opened

        self._post(follow)

    def give_up(self, opening: _Opening, error: OutOfRange) -> None:
        """Goes on without drafts for good: a text only grows."""
        if opening is not self._opening:
            return
        log.info("speculator.no_room", session_id=self._spec.session_id, reason=str(error))
        self._drop("OUT_OF_RANGE")
        self._detach(Absence.UNUSABLE)

    def _drop(self, status: str = "", *, is_error: bool = False) -> None:
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.end()
        if self._span.is_recorded:
            self._span.set_attributes(
                drafting_attributes(
                    self._speculator.drafter.model.model_id,
                    opening.session_id,
                    self._spec.speculation.method.name,
                    num_committed=opening.num_sent,
                    num_drafts=opening.num_drafts,
                    num_nodes=opening.num_nodes,
                )
            )
        self._span.end(status, is_error=is_error)

    def _detach(self, absence: Absence) -> None:
        if self._is_attached:
            self._is_attached = False
            self._listener.on_detached(absence)
