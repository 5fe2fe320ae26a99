"""One generation inside the engine: what its rounds verify, how long they wait, what their draws decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outrider.core.adjustments import Adjustment, TextAdjustments
from outrider.core.auto.strategies import params_of
from outrider.core.costs import DraftTimings, patience_ms
from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Continuation, Follower
from outrider.core.retrieval.retriever import TierSource
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.speculation import Steering, Waiting
from outrider.core.statistics import Absence, DraftTime, Peer, RoundTime, RunningMean
from outrider.core.tree import Draft, Node, StreamNodes, TokenId
from outrider.models.prefill import MIN_PREFILL_ROWS
from outrider.models.runner import KVCache, Segment
from outrider.models.text import TextCodec
from outrider.verifier.listener import GenerationListener, PeerRequests
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.reports import SessionReports
from outrider.verifier.retrieval import Question, SessionRetrieval
from outrider.verifier.round import (
    EmptyRoundReason,
    empty_round_reason,
    is_worth_verifying,
    next_chain,
    next_nodes,
)
from outrider.verifier.steering import DrafterSteering
from outrider.verifier.stop_text import StopText
from outrider.verifier.strategy_choice import StrategyChoice
from outrider.verifier.timings import EngineTimings

MAX_DRAFT_ROUNDS = 4.0
"""Plain rounds that a draft forward may take for an unknown drafter to be tried at once. A slower one can bring a
quarter at most, and takes several times as long as the target to read a prompt."""
DRAFTED = (Source.DRAFT, Source.GRAMMAR)
"""Sources of nodes for which a method that drafts first does not wait any more."""


class VerifySession:
    """Holds one generation in the engine. Owned by the engine's thread.

    A round goes: `is_ready` chooses the nodes and says when to begin, `segment` makes their rows, the engine runs the
    target, and `apply` takes its draws in and prepares the next round. Times are those of `time.perf_counter`.
    """

    def __init__(
        self,
        spec: SessionSpec,
        listener: GenerationListener,
        cache: KVCache,
        timings: EngineTimings,
        counts: RoundCounts,
        tiers: TierSource | None,
        now: float,
        codec: TextCodec | None = None,
        *,
        elder: VerifySession | None = None,
        has_drafter: bool = True,
    ) -> None:
        """
        Args:
            spec: The request.
            listener: Receives the verdicts.
            cache: Keys and values of the target, empty.
            timings: What all sessions have measured.
            counts: What all sessions have counted.
            tiers: Copies of the datastore's tiers. None means that there is no datastore.
            now: Time of the opening.
            codec: Decodes the text. None is for a generation without stop strings.
            elder: Has read the same prompt. None means that nobody has.
            has_drafter: True if drafts will come, should the method want any.
        """
        stop_text = StopText(spec, codec) if spec.stop and codec is not None else None
        self.session = Session(spec, counts, stop_text)
        self._has_adjustments = spec.sampling.has_adjustments
        self._adjustments = TextAdjustments(spec.sampling, self.session.tree, len(spec.prompt_token_ids))
        self.listener = listener
        self.cache = cache
        self._elder = elder
        self.opened_at = now
        """Time of the opening."""
        self.has_begun = False
        """True once it has had room in the pool."""
        self.is_paused = False
        """True while the reader of the generation is too slow for it."""
        self._timings, self._counts = timings, counts

        # The drafter.
        self._has_drafter = has_drafter and spec.speculation.method.has_draft_model
        self._is_attached = self._has_drafter
        self._has_opened = False
        """True once a stream of the drafter's was there."""
        self._has_drafted = False
        """True once something has come on the drafter's stream."""
        self._stream_nodes = StreamNodes(self.session.tree)
        self._accepted_per_chain = RunningMean(0.1)
        """Tokens that were kept of the chains that may be waited for."""
        self._num_timeouts = 0
        """Rounds in a row that have waited for a draft in vain."""
        self._misses: dict[int, float] = {}
        """Times of the commits whose first draft is timed, and has not come, by base_len."""

        # The strategy.
        self.choice = StrategyChoice(spec, timings)
        self._is_listening = False
        """True if the drafter has said something since the strategy needs it."""
        self._listens_from = len(self.session.committed)
        """Committed tokens that such a draft follows at least: one that was on its way before says nothing."""
        self.take_commits: Callable[[Sequence[TokenId]], object] | None = None
        """Takes the committed tokens as soon as there are new ones, on the engine's thread. None: the listener tells
        the drafter of its verdicts."""
        self._set_attached(self._is_attached)
        self._steering = DrafterSteering(spec.speculation, self.choice.strategy, timings)
        self._max_forward_us = int(MAX_DRAFT_ROUNDS * timings.plain_ms * 1e3) if self.choice.is_probing else 0

        # What is retrieved on this side.
        plan = target_plan(spec.speculation)
        self._retrieval = None if plan is None else SessionRetrieval(self.session, plan, timings, tiers)

        # What is told beside the tokens.
        self.reports = SessionReports(spec, stop_text)
        self.num_prompt_rows = 0
        """Rows with logits of the latest segment that only tell how probable the prompt is. They come first."""

        # The next round.
        self.nodes: list[Node] = []
        """Nodes that it verifies: a chain, or a sub-tree, the most probable path first."""
        self.ready_since: float | None = None
        """Time since which the next forward could have begun with it. None means that it was not ready yet."""
        self._committed_at = now
        self._waiting_since: float | None = None
        self._is_answered = False
        """True once a draft or a continuation has come that follows the latest commit."""
        self._empty_reason: EmptyRoundReason | None = None
        self._patience_ms = self._patience()
        self._is_disturbed = True
        """True if the time of this round says nothing of the rounds to come: it reads the prompt, or lost its room."""

    # Its room in the pool.

    @property
    def known_token_ids(self) -> Sequence[TokenId]:
        """Committed tokens, see `outrider.models.residency.Resident`."""
        return self.session.committed

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache."""
        return len(self.session.committed) - self.cache.length

    def enter(self, now: float) -> None:
        """Begins a round, or begins it again: there is room now."""
        self._committed_at = now
        self._waiting_since = self.ready_since = None
        self.has_begun = self._is_disturbed = True
        if self._elder is not None:
            # Not the last token of the prompt: its logits are needed.
            self.cache.join(self._elder.cache, len(self.session.spec.prompt_token_ids) - 1)
            self._elder = None

    # What comes from the drafter.

    def opening(self) -> tuple[Steering, int] | None:
        """Returns what `GenerationListener.on_begun` is told. None means that the method leaves no choice."""
        if not self.choice.is_auto:
            return None
        params = None if self.choice.is_first else params_of(self.choice.strategy, self.session.spec.speculation)
        return Steering(params), self._max_forward_us

    def attach(self, forward_us: int = 0) -> None:
        """Takes up a stream of the drafter's, whose node ids begin again.

        Args:
            forward_us: Time of a draft forward of one row, in microseconds. 0 means not known.
        """
        self._stream_nodes = StreamNodes(self.session.tree)
        self._set_attached(True)
        self._has_opened = True
        self.session.statistics.missing.find(Peer.SPECULATOR)
        self._num_timeouts = 0
        self._has_drafted = False
        # What the lost stream has left unanswered says nothing of the speed of this one.
        self._misses.clear()
        if self.reports.drafts is not None:
            self.reports.drafts.forget_commits()
        self._is_listening, self._listens_from = False, 0  # nothing of it was on its way before
        self._timings.set_draft_ms(forward_us / 1e3)
        if 0 < self._max_forward_us < forward_us:
            self._steering.begins_paused()  # so slow a drafter has begun with a pause
            with self._listening_anew():
                self.choice.hold_drafts()

    def detach(self, peer: Peer, absence: Absence) -> None:
        """Goes on without the drafter, which is this peer: its stream has ended, or there was none."""
        self._set_attached(False)
        # No draft comes any more that this round could wait for.
        self._patience_ms = min(self._patience_ms, self._patience())
        # What was not there when the session began was not lost. The caller of Collaborate opens no stream of its own.
        if self._has_opened or self._has_drafted:
            self.session.statistics.add(num_speculator_losses=1)
        self.session.statistics.missing.miss(peer, absence)

    def _set_attached(self, is_attached: bool) -> None:
        self._is_attached = is_attached
        with self._listening_anew():
            self.choice.set_attached(is_attached)

    @contextmanager
    def _listening_anew(self) -> Iterator[None]:
        """Listens anew for a drafter that had nothing to do before the strategy may have changed."""
        was_drafted = self.choice.strategy.method.has_draft_model
        yield
        if self.choice.is_auto and not was_drafted:
            self._is_listening, self._listens_from = False, len(self.session.committed)

    @property
    def _is_pending(self) -> bool:
        """True if the strategy needs a drafter that has said nothing yet: it reads what it has missed."""
        return self.is_drafting and not self._is_listening

    def add_draft(self, draft: Draft, now: float, arrived_at: float | None = None) -> None:
        """Adds new nodes to the mirror of the draft tree, which have arrived before if a forward was running."""
        if self.reports.drafts is not None:
            self.reports.drafts.add(draft, now if arrived_at is None else arrived_at)
        self._stream_nodes.add(draft)
        self.session.statistics.add(
            num_draft_forwards=draft.num_forwards,
            num_phrase_tokens=draft.num_phrase_tokens,
            num_draft_rows=draft.num_rows,
            num_withheld_nodes=draft.num_withheld_nodes,
        )
        self._num_timeouts = 0
        self._is_listening = self._is_listening or draft.base_len >= self._listens_from
        self._mark_answered(draft.base_len)
        missed_at = self._misses.pop(draft.base_len, None)
        # Drafts come in order: commits before this one will not be answered any more.
        self._misses = {base_len: at for base_len, at in self._misses.items() if base_len > draft.base_len}
        # The first answer includes the drafter's prefill, which says nothing of the answers to come.
        if missed_at is not None and self._has_drafted:
            # A round that has begun already does not wait for it.
            is_late = self.takes_turns and draft.base_len < len(self.session.committed)
            there_at = arrived_at if is_late and arrived_at is not None else now
            time = DraftTime((there_at - missed_at) * 1e3, draft.forward_us / 1e3, draft.retrieval_us / 1e3)
            self.session.statistics.draft_times.append(time)
            self._counts.draft_latencies.add(time.draft_latency_ms / 1e3)
            self._timings.speculator_ms.add(time.draft_latency_ms)
            self._timings.draft_forward_ms.add(time.draft_forward_ms)
        self._has_drafted = True

    # What comes from the datastore.

    def add_continuation(self, base_len: int, continuation: Continuation, now: float) -> Question | None:
        """Takes in what the datastore has found for the first base_len tokens, possibly nothing.

        Returns:
            What to ask it next; None means nothing.
        """
        self.session.statistics.missing.find(Peer.DATASTORE)
        is_awaited = self._retrieval is not None and self._retrieval.add(base_len, continuation)
        # `_mark_answered` stands first because it must see every answer, awaited or not.
        if self._mark_answered(base_len) and is_awaited and self.session.statistics.num_rounds:
            self._timings.datastore_ms.add((now - self._committed_at) * 1e3)
        return self._take_question()

    def lose_datastore(self, absence: Absence) -> None:
        """Goes on with what is known in process, as the datastore does not answer."""
        self.session.statistics.missing.miss(Peer.DATASTORE, absence)
        if self._retrieval is not None:
            self._retrieval.lose()
        self._patience_ms = self._patience()

    def _mark_answered(self, base_len: int) -> bool:
        """Returns True for the first answer to the latest commit."""
        is_first = base_len == len(self.session.committed) and not self._is_answered
        self._is_answered = self._is_answered or is_first
        return is_first

    # Whether the next round should begin.

    def is_ready(self, now: float) -> bool:
        """Chooses the nodes of the next round, and returns True if it should begin with them."""
        if self.is_prefilling:
            self.ready_since = self.ready_since or now
            return True
        self.nodes = self.known_nodes()
        # The datastore may have answered with nothing: then there is nothing more to wait for.
        if self._is_worth_verifying() or now >= self.deadline or (self._is_answered and not self.is_drafting):
            self.ready_since = self.ready_since or now
            return True
        if self._waiting_since is None:
            self._waiting_since = now
        return False

    @property
    def deadline(self) -> float:
        """Time at which waiting for a draft or a continuation ends."""
        return self._committed_at + self._patience_ms / 1e3

    @property
    def is_prefilling(self) -> bool:
        """True while more of the prompt is missing in the cache than goes into a round."""
        return self.num_missing > MIN_PREFILL_ROWS

    @property
    def is_drafting(self) -> bool:
        """True if drafts are on their way, and wanted."""
        return self._is_attached and self.choice.strategy.method.has_draft_model

    @property
    def takes_turns(self) -> bool:
        """True if the target should wait for its draft, and the draft model for its verdict, as both share a GPU."""
        is_heard = self._is_attached and self._is_listening and self.choice.strategy.method.has_draft_model
        is_awaited = is_heard and self._waiting.is_certain
        return self.session.spec.shares_gpu and is_awaited and not self.is_prefilling

    @property
    def can_follow_draw(self) -> bool:
        """True if the next round can be launched before the host knows what this one draws: both are plain, and nothing
        but the drawn token is read of this one's logits, which would be waited for behind the next ones."""
        report = self.session.spec.report
        reads_logits = self.num_prompt_rows or (report.logprobs is not None and report.logprobs_mode.is_processed)
        return not self.nodes and self.session.is_as_drawn and self.choice.goes_on_plain and not reads_logits

    @property
    def accepted_per_chain(self) -> float:
        """Tokens that were kept of the chains that were waited for, on average."""
        return self._accepted_per_chain.get(1.0)

    @property
    def _waiting(self) -> Waiting:
        return self.choice.strategy.method.waits(self.session.spec.speculation)

    def _is_worth_verifying(self) -> bool:
        if not self.is_drafting or self._is_answered:
            return bool(self.nodes)
        if self._waiting.is_certain and self.nodes and self.nodes[0].source not in DRAFTED:
            return False  # draft, then verify: what was retrieved stands behind the draft, not in its place
        return is_worth_verifying(self.session, self.nodes, self._timings, self._accepted_per_chain.get(1.0))

    def known_nodes(self) -> list[Node]:
        """Chooses of what is there now the nodes of the next round."""
        return next_nodes(self.session, self._retrieval, self.choice.strategy, self._timings)

    def _patience(self) -> float:
        """Returns how long a draft or a continuation is worth waiting for after a commit, in milliseconds."""
        is_drafting = self.is_drafting
        if not is_drafting and self._retrieval is None:
            return 0.0  # nobody answers
        # The last token is the target's own: no chain fits before it.
        if self.session.num_wanted <= 1:
            return 0.0
        if self._is_pending and self.choice.is_probing:
            return 0.0  # a reading may take many rounds, and is worth none of them before it is known what it leads to
        if is_drafting:
            latency_ms, forward_ms = self._timings.speculator_ms.value, self._timings.forward_ms.get(0.0)
            accepted = self.accepted_per_chain
            num_sessions = self._timings.num_sessions
            timings = DraftTimings(latency_ms, forward_ms, accepted, self._num_timeouts, num_sessions)
            return patience_ms(self._waiting, timings)
        if self._retrieval is not None and self.choice.strategy.retrieval:
            return self._retrieval.patience_ms()
        return 0.0

    # The round.

    def segment(self, max_prefill_rows: int, max_num_nodes: int) -> Segment:
        """Makes the rows of this round: what is committed but not in the cache yet, then the nodes.

        Args:
            max_prefill_rows: Most rows of a prompt; a longer one comes in several rounds, the last one of which alone
                has logits.
            max_num_nodes: Most nodes; the others are dropped.
        """
        # After a round this is the last committed token alone: `apply` keeps the slots of all before it.
        pending = list(self.session.committed[self.cache.length :])
        is_prefilling = len(pending) > MIN_PREFILL_ROWS
        if is_prefilling and len(pending) > max_prefill_rows:
            # No verdict follows, which would begin a round: the next piece is ready from the next plan on.
            self.ready_since = None
            self.num_prompt_rows = max_prefill_rows if self.reports.wants_prompt else 0
            return Segment(self.cache, pending[:max_prefill_rows], num_logits=self.num_prompt_rows)
        # The last piece of a prompt; `is_ready` has chosen no nodes while there was more of it.
        if is_prefilling:
            self.nodes = self.known_nodes()
        is_crowded_out = bool(self.nodes) and not max_num_nodes
        # Parents come before their children: what is left is a chain or a sub-tree still.
        self.nodes = self.nodes[:max_num_nodes]
        self._empty_reason = self._reason_if_empty(is_crowded_out=is_crowded_out)
        self.num_prompt_rows = len(pending) - 1 if self.reports.wants_prompt else 0
        num_logits = self.num_prompt_rows + 1 + len(self.nodes)
        return Segment.of_tree(self.cache, pending, self.nodes, num_logits=num_logits)

    def _reason_if_empty(self, *, is_crowded_out: bool) -> EmptyRoundReason | None:
        if self.nodes or self.session.max_chain_len < 1:
            return None
        if is_crowded_out:
            return EmptyRoundReason.LOAD
        return empty_round_reason(
            self.choice.strategy,
            has_drafter=self._has_drafter,
            is_attached=self._is_attached,
            has_drafted=self._has_drafted,
            is_answered=self._is_answered,
            was_awaited=self._waiting_since is not None,
        )

    def adjustments(self) -> list[Adjustment | None]:
        """Returns for each row of the round how its logits are changed before a token is drawn; empty if none is."""
        if not self._has_adjustments:
            return []
        return [self._adjustments.behind(node) for node in (self.session.tree.root, *self.nodes)]

    @property
    def wants_next_tokens(self) -> bool:
        """True if `apply` shall be told the most probable next tokens of every row."""
        return self._retrieval is not None and self._retrieval.wants_next_tokens

    def apply(
        self,
        draws: Sequence[TokenId],
        forward_ms: float,
        started: float,
        now: float,
        next_tokens: Sequence[Sequence[Follower]] = (),
        num_forward_rows: int = 0,
        *,
        is_ahead: bool = False,
    ) -> Verdict:
        """Commits what the target's draws decide, and prepares the next round.

        Args:
            draws: The target's token for each row with logits.
            forward_ms: Time of the target's forward.
            started: Time at which the round began.
            now: Time at which its draws were there.
            next_tokens: The most probable ones of each row with their weights, if the session wants them.
            num_forward_rows: Rows of the forward, those of other sessions included.
            is_ahead: True if the row of the next round is in the cache already.
        """
        session, nodes = self.session, self.nodes
        self._count_timeout()
        if self._retrieval is not None:
            self._retrieval.watch(nodes, draws, next_tokens)
        length = len(session.committed)  # read before the verdict, which appends to them
        self.reports.watch(nodes)
        verdict = session.apply(nodes, draws)
        # Committed tokens fill the slots below `length`; row 0 is the last of them, so row 1 lies at `length`.
        if not is_ahead:
            self.cache.keep(length, [length + row - 1 for row in verdict.accepted_rows])
        if session.statistics.num_rounds == 1:
            # From now on others find the prompt, while this session goes on behind it.
            self.cache.publish(session.committed)
        # A retrieved chain in place of a draft says nothing of what a draft that is waited for is worth.
        if nodes and (nodes[0].source is Source.DRAFT or not self.is_drafting):
            self._accepted_per_chain.add(verdict.num_accepted)
        if self._retrieval is not None:
            rejected_rows = () if verdict.rejected_row is None else (verdict.rejected_row,)
            judged = [nodes[row - 1] for row in (*verdict.accepted_rows, *rejected_rows)]
            self._retrieval.learn(judged, verdict, looks_up=self.choice.strategy.retrieval)
        method = self.choice.strategy.method  # read before the controller chooses that of the next round
        times = self._count_round(verdict, forward_ms, started, now)
        # A round that runs already is a plain one, whatever has just been chosen: it says nothing of that.
        self._is_disturbed = is_ahead and not self.choice.strategy.is_plain
        verdict = self.reports.complete(verdict, method, nodes, times, num_forward_rows)
        self._begin_round(now)
        return verdict

    def _count_timeout(self) -> None:
        if self.nodes or self._waiting_since is None or self._is_answered:
            return
        if self.is_drafting:
            self._num_timeouts += 1
        elif self._retrieval is not None:
            self._retrieval.time_out()

    def _count_round(self, verdict: Verdict, forward_ms: float, started: float, now: float) -> RoundTime:
        """Counts a round and its times, which it returns, and lets the controller choose the strategy of the next
        one."""
        has_waited, statistics = self._waiting_since is not None, self.session.statistics
        wait_ms = 0.0 if self._waiting_since is None else (started - self._waiting_since) * 1e3
        retrieval_ms = 0.0 if self._retrieval is None else self._retrieval.spent_s * 1e3
        times = RoundTime((now - self._committed_at) * 1e3, forward_ms, wait_ms, retrieval_ms)
        statistics.round_times.append(times)
        statistics.missing.end_round()
        is_first = statistics.num_rounds == 1  # this round is counted already
        is_disturbed, self._is_disturbed = self._is_disturbed, False
        method = self.choice.strategy.method
        self._counts.add_round(self.session.spec, method, verdict, self._empty_reason, is_first=is_first)
        self._counts.add_times(times, is_first=is_first, has_waited=has_waited)
        if not is_disturbed and not self.choice.is_probing:
            self._timings.add_overhead(times.overhead_ms)
        if self.choice.is_auto:
            if not is_disturbed:
                self.choice.observe(len(verdict.token_ids), times.round_ms, is_pending=self._is_pending)
            with self._listening_anew():
                self.choice.choose()
        if verdict.finish_reason is not None:
            statistics.decisions = self.choice.decisions()
        return times

    def _begin_round(self, now: float) -> None:
        """Prepares the next round: what is known in process continues the commit at once."""
        self.nodes = []
        self._committed_at, self._waiting_since, self.ready_since, self._is_answered = now, None, None, False
        if self._retrieval is not None:
            self._retrieval.begin_round()
            # A strategy without retrieval neither looks anything up nor sends what it would ask.
            if self.session.finish_reason is None and self.choice.strategy.retrieval:
                # Read first: choosing the chain adds to the tree what is known in process.
                was_known = bool(self.session.tree.root.children)
                next_chain(self.session, self._retrieval, self.choice.strategy)
                self._retrieval.ask(was_known=was_known)
        if self.reports.drafts is not None and self._is_attached:
            self.reports.drafts.commit(len(self.session.committed), now)
        # What answers a drafter's reading says nothing of its speed.
        if self.is_drafting and self._is_listening and (self.takes_turns or not self.session.tree.root.children):
            self._misses[len(self.session.committed)] = now
        # Behind `ask`: the datastore's answer is waited for only if it has put a question.
        self._patience_ms = self._patience()

    # What the peers should know.

    def peer_requests(self) -> PeerRequests:
        """Returns what to send to the peers after a round. What is returned here is not returned again."""
        steering = self._steering.next(self.choice.strategy) if self._is_attached else None
        return PeerRequests(self._take_question(), steering)

    def _take_question(self) -> Question | None:
        if self._retrieval is None or not self.choice.strategy.retrieval:
            return None
        return self._retrieval.take_question()
