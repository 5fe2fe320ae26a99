"""The drafter of a generation, as its session in the engine sees it.

A `Link` is its state::

    PENDING                  add_draft, of one that answers        -> LIVE
    LIVE                     attach, of another stream             -> PENDING
    PENDING, LIVE            follow, of a strategy without drafts  -> PAUSED
    PAUSED                   follow, of a strategy with drafts     -> PENDING
    PENDING, LIVE, PAUSED    detach                                -> LOST
    LOST                     attach                                -> PENDING, or PAUSED if the strategy has no drafts

Any other event leaves the state as it is, and no event leaves ABSENT. Drafts are waited for in PENDING and LIVE alone.
A draft that comes in another state is added to the draft tree all the same: the content rule decides what it is worth
(`outrider.core.tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from outrider.core.auto.strategies import PLAIN, Strategy, params_of
from outrider.core.costs import DraftTimings, patience_ms
from outrider.core.params import Source
from outrider.core.session import Session
from outrider.core.speculation import Steering, Waiting
from outrider.core.statistics import Absence, DraftTime, Peer, RunningMean
from outrider.core.tree import Draft, Node, StreamNodes
from outrider.rounds.timings import EngineTimings

NEAR_PART = 4
"""The drafter is told a new number of nodes when the old one is off by more than one part in this many."""
MAX_DRAFT_ROUNDS = 4.0
"""An unknown drafter is tried at once if its forward takes at most this many plain rounds. A slower one can bring a
quarter at most, and takes several times as long as the target to read a prompt."""


class Link(Enum):
    """The state of a session's drafter."""

    ABSENT = "absent"
    """The session has none, and gets none: its method wants no drafts, or there is no drafter."""
    PENDING = "pending"
    """Drafts are wanted, and it has not answered since: its stream opens, or it reads the text that it has missed."""
    LIVE = "live"
    """Drafts are wanted, and it has answered."""
    PAUSED = "paused"
    """The strategy wants no drafts."""
    LOST = "lost"
    """Its stream has ended, or could not be opened."""


class DrafterLink:
    """Takes a drafter's nodes in, and tracks what to expect of it. Owned by the engine's thread."""

    def __init__(
        self,
        generation: Session,
        strategy: Strategy,
        timings: EngineTimings,
        *,
        has_drafter: bool,
        is_probing: bool,
    ) -> None:
        """
        Args:
            generation: The generation that is drafted for.
            strategy: The strategy that its rounds begin with.
            timings: What all sessions have measured.
            has_drafter: False for a session without a drafter. One that has a drafter expects it from the beginning.
            is_probing: True while it is unknown whether drafts pay.
        """
        self._generation, self._timings = generation, timings
        self._strategy = strategy
        self._known_strategy = strategy
        """The strategy that the drafter was last told."""
        self._told = Steering()
        """The latest steering that the drafter was sent."""
        self.max_forward_us = int(MAX_DRAFT_ROUNDS * timings.plain_ms * 1e3) if is_probing else 0
        """A drafter whose forward takes longer than this, in microseconds, begins with a pause. 0: none is too slow."""
        self.state = self._unheard if has_drafter else Link.ABSENT
        self._nodes: StreamNodes | None = None
        """Nodes of the latest stream. None: there was no stream and no draft yet."""
        self._answers_from = len(generation.committed)
        """Fewest committed tokens that a draft must follow to count as an answer in PENDING: a draft that follows fewer
        was already on its way."""
        self._unanswered: dict[int, float] = {}
        """Times of the commits whose first draft is timed and has not come, by their numbers of committed tokens."""
        self._num_timeouts = 0
        """Rounds in a row that have waited for a draft that did not come."""
        self._accepted_per_chain = RunningMean(0.1)
        """Tokens that were kept of the chains that may be waited for."""

    @property
    def _unheard(self) -> Link:
        """The state of a drafter that has not answered yet."""
        return Link.PENDING if self._strategy.method.has_draft_model else Link.PAUSED

    @property
    def is_attached(self) -> bool:
        """True if the drafter is there, or expected."""
        return self.state not in (Link.ABSENT, Link.LOST)

    @property
    def is_drafting(self) -> bool:
        """True if drafts are on their way, and wanted."""
        return self.state in (Link.PENDING, Link.LIVE)

    # Events.

    def attach(self, forward_us: int = 0) -> bool:
        """Takes up a stream, whose node ids begin again.

        Args:
            forward_us: Time of a draft forward of one row, in microseconds. 0 means not known.

        Returns:
            True if the drafter is so slow that it begins with a pause.
        """
        self._generation.statistics.missing.find(Peer.SPECULATOR)
        if self.state is not Link.ABSENT:
            self.state = self._unheard
        self._nodes = StreamNodes(self._generation.tree)
        self._answers_from = 0  # nothing of this stream was on its way before
        self._num_timeouts = 0
        self._unanswered.clear()  # discard latency samples of the lost stream
        is_too_slow = 0 < self.max_forward_us < forward_us
        if is_too_slow:
            self._known_strategy = PLAIN
        return is_too_slow

    def detach(self, peer: Peer, absence: Absence) -> None:
        """Goes on without the drafter, which is this peer: its stream has ended, or there was none."""
        if self.state is not Link.ABSENT:
            self.state = Link.LOST
        statistics = self._generation.statistics
        if self._nodes is not None:  # a drafter that never came was not lost
            statistics.add(num_speculator_losses=1)
        statistics.missing.miss(peer, absence)

    def follow(self, strategy: Strategy) -> None:
        """Goes on by a strategy. After one without drafts, the drafter has to read what it has missed."""
        self._strategy = strategy
        if self.is_drafting and not strategy.method.has_draft_model:
            self.state = Link.PAUSED
        elif self.state is Link.PAUSED and strategy.method.has_draft_model:
            self.state, self._answers_from = Link.PENDING, len(self._generation.committed)

    def add_draft(self, draft: Draft, now: float, arrived_at: float) -> DraftTime | None:
        """Adds new nodes to the mirror of the draft tree.

        Args:
            draft: The nodes.
            now: The time, in seconds.
            arrived_at: Time at which the draft came, which is earlier if a forward was running.

        Returns:
            The time that the drafter took for this answer to a commit. None if that is not timed.
        """
        if self._nodes is None:
            self._nodes = StreamNodes(self._generation.tree)  # a caller that drafts itself opens no stream
        self._nodes.add(draft)
        statistics = self._generation.statistics
        statistics.add(
            num_draft_forwards=draft.num_forwards,
            num_phrase_tokens=draft.num_phrase_tokens,
            num_draft_rows=draft.num_rows,
            num_withheld_nodes=draft.num_withheld_nodes,
        )
        self._num_timeouts = 0
        if self.state is Link.PENDING and draft.base_len >= self._answers_from:
            self.state = Link.LIVE
        committed_at = self._unanswered.pop(draft.base_len, None)
        # Drafts come in order: commits before this one will not be answered any more.
        self._unanswered = {base_len: at for base_len, at in self._unanswered.items() if base_len > draft.base_len}
        if committed_at is None:
            return None
        # A round that has begun already does not wait for it.
        is_late = self.takes_turns and draft.base_len < len(self._generation.committed)
        latency_s = (arrived_at if is_late else now) - committed_at
        time = DraftTime(latency_s * 1e3, draft.forward_us / 1e3, draft.retrieval_us / 1e3)
        statistics.draft_times.append(time)
        self._timings.speculator_ms.add(time.draft_latency_ms)
        self._timings.draft_forward_ms.add(time.draft_forward_ms)
        return time

    def time_answer(self, now: float) -> None:
        """Times the first draft after the current commit, if the next round needs it. The first one in PENDING is not
        timed: it includes reading the text, and is not representative."""
        if self.state is Link.LIVE and (self.takes_turns or not self._generation.tree.root.children):
            self._unanswered[len(self._generation.committed)] = now

    def time_out(self) -> None:
        """Counts a round that has waited for a draft that did not come."""
        self._num_timeouts += 1

    def learn_verdict(self, nodes: Sequence[Node], num_accepted: int) -> None:
        """Learns from a round what a draft that is waited for is worth.

        Args:
            nodes: The nodes that it verified.
            num_accepted: How many of them were kept.
        """
        # A retrieved chain in place of a draft is no evidence of that.
        if nodes and (nodes[0].source is Source.DRAFT or not self.is_drafting):
            self._accepted_per_chain.add(num_accepted)

    # Waiting.

    @property
    def waiting(self) -> Waiting:
        """Says how the strategy waits for drafts."""
        return self._strategy.method.waits(self._generation.spec.speculation)

    @property
    def takes_turns(self) -> bool:
        """True if the target should wait for its draft, and the draft model for its verdict, as both share a GPU."""
        shares_gpu = self._generation.spec.shares_gpu
        return shares_gpu and self.state is Link.LIVE and self.waiting.is_certain

    @property
    def accepted_per_chain(self) -> float:
        """Tokens that were kept of the chains that were waited for, on average."""
        return self._accepted_per_chain.get(1.0)

    def patience_ms(self) -> float:
        """Returns how long a draft is worth waiting for after a commit, in milliseconds."""
        timings, accepted = self._timings, self.accepted_per_chain
        latency_ms, forward_ms = timings.speculator_ms.value, timings.forward_ms.get(0.0)
        known = DraftTimings(latency_ms, forward_ms, accepted, self._num_timeouts, timings.num_sessions)
        return patience_ms(self.waiting, known)

    # What it is told.

    def next_steering(self) -> Steering | None:
        """Returns news that the drafter should be told. None means that there is none, or no drafter."""
        if not self.is_attached:
            return None
        strategy, timings, told = self._strategy, self._timings, self._told
        forward_us, round_trip_us = told.forward_us, told.round_trip_us
        # Milliseconds to microseconds. At least 1, as 0 means that nothing has changed.
        if strategy.method.has_draft_model:
            forward_us = max(1, int(timings.forward_ms.get(0.0) * 1e3))
        if timings.speculator_ms.value is not None:
            round_trip_us = max(1, int((timings.speculator_ms.value - timings.draft_forward_ms.get(0.0)) * 1e3))
        max_num_nodes, is_new = self._max_num_nodes(), strategy != self._known_strategy
        are_near = _is_near(told.forward_us, forward_us) and _is_near(told.round_trip_us, round_trip_us)
        if are_near and max_num_nodes == told.max_num_nodes and not is_new:
            return None
        speculation = params_of(strategy, self._generation.spec.speculation) if is_new else None
        self._told, self._known_strategy = Steering(speculation, forward_us, round_trip_us, max_num_nodes), strategy
        return self._told

    def _max_num_nodes(self) -> int:
        """Returns the most nodes of a round, as told to the drafter. 0 means that it need not know."""
        params, told = self._generation.spec.speculation, self._told.max_num_nodes
        most = params.num_speculative_tokens
        measured = int(self._timings.max_num_nodes.get(most))
        # A drafter that is not waited for loses nothing by drafting more, and one that would not draft more needs no
        # number.
        if self.waiting is not Waiting.IN_TURNS or (not told and measured >= most):
            return told
        measured = max(1, min(most, measured))
        # Sessions come and go: without slack it would be told in each round. It is always told when there is room for
        # all again.
        is_near = abs(measured - told) <= told // NEAR_PART and measured < most
        return told if told and is_near else measured


def _is_near(known_us: int, measured_us: int) -> bool:
    """Returns True if a drafter that knows the one time would do the same with the other."""
    return abs(known_us - measured_us) <= max(500, known_us // 3)
