"""The peers of the proposer, on a thread with an event loop of its own.

vLLM's thread hands steps over, and reads the latest chain of each session; neither takes a lock. What goes wrong here
is logged and counted, and costs drafts alone.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from outrider.core.costs import ForwardTimes
from outrider.core.params import SamplingParams
from outrider.core.session import SessionSpec, Verdict
from outrider.core.tree import Node
from outrider.peers.channel import read_peers
from outrider.peers.datastore import DatastorePeer
from outrider.peers.fleet import SpeculatorFleet
from outrider.rounds.timings import Activity, EngineTimings
from outrider.security.addresses import addresses_of
from outrider.telemetry.metrics import Metrics, counter, gauge
from outrider.vllm.budget import FIRST_MS
from outrider.vllm.drafted_row import Chain, DraftedRow, Peers
from outrider.vllm.rows import Sighting
from outrider.vllm.settings import ProposerSettings
from outrider.wire.handshake import Model

log = structlog.get_logger(__name__)

IDLE_S = 30.0
"""Time without a step after which all sessions end: vLLM does not say that a request is over."""
CLOSE_S = 5.0
"""Longest wait for the thread's end."""


class Commit(NamedTuple):
    """What a step has drawn for one session."""

    sighting: Sighting
    nodes: Sequence[Node]
    """The chain that the step verified."""


class Step(NamedTuple):
    """What the peers should know of one step."""

    commits: Sequence[Commit]
    ended: Sequence[int]
    """Sessions that have ended."""
    step_ms: float
    """Its time. 0: it is no evidence."""
    forward_times: ForwardTimes
    """Times of steps by their rows."""


class DraftClient:
    """Drafts for the sessions of one vLLM. Its methods are called by vLLM's thread, unless they say otherwise."""

    def __init__(
        self,
        settings: ProposerSettings,
        model: Model,
        num_speculative_tokens: int,
        on_verdict: Callable[[Verdict], object] = lambda verdict: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts the thread. Nothing is waited for: the peers may come later.

        Args:
            settings: The settings.
            model: The target.
            num_speculative_tokens: Most tokens of a chain.
            on_verdict: Called on the loop with each verdict.
            clock: Returns the time in seconds.

        Raises:
            UnusableFile: A file of the settings cannot be used.
        """
        self._settings, self._model, self._on_verdict, self._clock = settings, model, on_verdict, clock
        self._security = settings.peer_security()
        self._speculation = settings.speculation(num_speculative_tokens)
        self._run_id, self._run_numbers = uuid.uuid4().hex[:12], itertools.count(1)
        self._inbox: deque[tuple[int, Step]] = deque()
        self._chains: dict[int, Chain] = {}
        """What follows the text of each session; written by the loop alone."""
        self._num_handed_over = self._num_taken = 0
        self._has_news = threading.Event()
        self.num_failures = 0
        """Sessions, and whole threads, that were given up for an error here."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._is_closed = False
        self._rows: dict[int, DraftedRow] = {}
        self._changed: dict[int, DraftedRow] = {}
        self._peers = Peers(None, None)
        self._timings = EngineTimings(ForwardTimes({1: FIRST_MS}))
        self._taken_at = clock()
        self._thread = threading.Thread(target=self._run, name="outrider", daemon=True)
        self._thread.start()

    # vLLM's thread.

    def hand_over(self, step: Step) -> None:
        """Hands a step over to the loop."""
        self._num_handed_over += 1
        self._inbox.append((self._num_handed_over, step))
        if not self._thread.is_alive():
            self._inbox.clear()
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._take)

    def chain(self, number: int) -> Chain | None:
        """Returns what follows a session's text, as far as is known now."""
        return self._chains.get(number)

    @property
    def may_draft(self) -> bool:
        """True if there may be drafts at all: peers are there, or texts are looked up in process."""
        return self._speculation.retrieves or self._peers.are_there

    @property
    def is_up_to_date(self) -> bool:
        """True if the chains are those after the latest step."""
        return self._num_taken == self._num_handed_over

    def wait(self, deadline: float) -> bool:
        """Waits until some chain may have changed. Returns False if none has by the deadline, in the clock's
        seconds."""
        left_s = deadline - self._clock()
        if left_s <= 0 or not self._thread.is_alive():
            return False
        has_news = self._has_news.wait(left_s)
        self._has_news.clear()
        return has_news

    def close(self) -> None:
        """Ends all sessions and the thread. Idempotent."""
        self._is_closed = True
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)

    def metrics(self) -> Metrics:
        """Yields what is known of the peers. Safe to call in any thread."""
        speculators, datastore = self._peers
        states = [] if speculators is None else speculators.states
        yield from read_peers(states if datastore is None else [*states, datastore.state])
        if speculators is not None:
            yield from speculators.metrics()
        yield gauge("outrider_vllm_sessions", "Sessions that are drafted for.", len(self._rows))
        yield counter(
            "outrider_vllm_failures_total", "Sessions given up for an error of the proposer's own.", self.num_failures
        )

    # The loop.

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            self.num_failures += 1
            log.exception("proposer.stopped", consequence="vLLM goes on without drafts")

    async def _serve(self) -> None:
        settings, model = self._settings, self._model
        speculators, datastore = None, None
        if settings.speculator:
            speculators = SpeculatorFleet(
                addresses_of(settings.speculator), model, self._security, settings.max_draft_nodes_per_s
            )
            speculators.start()
        if settings.datastore:
            tokens = model.tokenizer_hash, model.vocab_size
            datastore = DatastorePeer(settings.datastore, *tokens, settings.corpus, settings.tenant, self._security)
        self._peers = Peers(speculators, datastore)
        self._loop = asyncio.get_running_loop()
        # What was said before there was a loop.
        self._take()
        if self._is_closed:
            self._stop.set()
        try:
            while not self._stop.is_set():
                try:
                    await asyncio.wait_for(self._stop.wait(), IDLE_S)
                except TimeoutError:
                    self._end_if_idle()
        finally:
            self._end(list(self._rows))
            if speculators is not None:
                await speculators.close()
            if datastore is not None:
                await datastore.close()

    def _end_if_idle(self) -> None:
        # After twice the time at which vLLM's thread begins anew: a session that it goes on with is not ended here.
        if self._clock() - self._taken_at > 2 * IDLE_S:
            self._end(list(self._rows))

    def _take(self) -> None:
        """Takes the steps in that were handed over."""
        while self._inbox:
            number, step = self._inbox.popleft()
            self._taken_at = self._clock()
            self._timings.forward_times = step.forward_times
            self._timings.forward_ms.add(step.forward_times.of(max(1, len(step.commits))))
            self._end(step.ended)
            for commit in step.commits:
                self._guarded(commit.sighting.number, partial(self._commit, commit, step.step_ms))
            self._end_step(step)
            self._publish()
            self._num_taken = number
            self._has_news.set()

    def _guarded(self, number: int, act: Callable[[], object]) -> None:
        """Gives a session up if an error comes of it: the others go on."""
        try:
            act()
        except Exception:
            self.num_failures += 1
            if self.num_failures == 1:
                log.exception("proposer.failed", consequence="this session goes on without drafts; others are counted")
            self._end([number])

    def _commit(self, commit: Commit, step_ms: float) -> None:
        sighting = commit.sighting
        row = self._rows.get(sighting.number)
        if row is None and not sighting.base_len:
            self._rows[sighting.number] = row = self._begin(sighting)
        elif row is not None and row.length != sighting.base_len:
            raise ValueError(f"a session of {row.length} tokens is said to have had {sighting.base_len}")
        elif row is not None and sighting.token_ids:
            for verdict in row.commit(sighting.token_ids, commit.nodes, step_ms):
                self._on_verdict(verdict)
        if row is not None:
            self._changed[sighting.number] = row

    def _begin(self, sighting: Sighting) -> DraftedRow:
        spec = SessionSpec(
            session_id=f"vllm-{self._run_id}-{sighting.number}",
            prompt_token_ids=tuple(sighting.token_ids),
            sampling=SamplingParams(temperature=0.0),
            speculation=self._speculation,
            vocab_size=self._model.vocab_size,
            max_tokens=max(1, self._model.max_context_len - len(sighting.token_ids)),
        )
        return DraftedRow(spec, self._peers, self._timings, self._clock, partial(self._on_news, sighting.number))

    def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._chains.pop(number, None)
            self._changed.pop(number, None)
            if (row := self._rows.pop(number, None)) is not None:
                row.close()

    def _end_step(self, step: Step) -> None:
        """Has the sessions learn from the step, and from each other."""
        rows = [row for commit in step.commits if (row := self._rows.get(commit.sighting.number)) is not None]
        shares = [row.choice.take_share() for row in rows]
        self._timings.end_step(shares, self._taken_at, is_typical=step.step_ms > 0)
        self._timings.set_sessions([Activity.of(row.choice.strategy) for row in rows])

    def _on_news(self, number: int, row: DraftedRow) -> None:
        # Drafts come in many messages: what follows is chosen once for all that are here.
        if not self._changed and self._loop is not None:
            self._loop.call_soon(self._publish)
        self._changed[number] = row

    def _publish(self) -> None:
        changed, self._changed = self._changed, {}
        for number, row in changed.items():
            if self._rows.get(number) is row:
                self._guarded(number, partial(self._set_chain, number, row))
        self._has_news.set()

    def _set_chain(self, number: int, row: DraftedRow) -> None:
        self._chains[number] = row.chain()
