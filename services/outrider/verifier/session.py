"""One generation inside the engine: its rounds, its drafter, its room in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from outrider.core.adjustments import Adjustment, TextAdjustments
from outrider.core.auto.strategies import params_of
from outrider.core.retrieval.ngrams import Continuation, Follower
from outrider.core.retrieval.retriever import TierSource
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.speculation import Steering
from outrider.core.statistics import Absence, Peer, RoundTime
from outrider.core.tree import Draft, TokenId
from outrider.models.runner import KVCache
from outrider.models.text import TextCodec
from outrider.rounds.drafter_link import DrafterLink, Link
from outrider.rounds.retrieval import Question, SessionRetrieval
from outrider.rounds.strategy_choice import StrategyChoice
from outrider.rounds.timings import EngineTimings
from outrider.verifier.listener import GenerationListener, PeerRequests
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.reports import SessionReports
from outrider.verifier.round import Forward, Parts, Round
from outrider.verifier.stop_text import StopText


class Phase(Enum):
    """The phase of a session. Reading its text is no phase: a session can lose its room to others and then reads again
    in any phase (`Round.is_prefilling`). Its end is no phase either: the engine forgets it then."""

    WAITING = "waiting"
    """It has had no room in the pool yet."""
    RUNNING = "running"
    PAUSED = "paused"
    """The reader of the generation is too slow for it."""


class VerifySession:
    """Holds one generation in the engine. Owned by the engine's thread.

    The steps of a round: `Round.is_ready` chooses its nodes and says when to begin, `Round.segment` makes their rows,
    the engine runs the target, and `settle` takes its draws in and makes the next round. Times are those of
    `time.perf_counter`.
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
            elder: A session that has read the same prompt. None means that there is none.
            has_drafter: True if drafts will come, should the method want any.
        """
        stop_text = StopText(spec, codec) if spec.stop and codec is not None else None
        self.generation = Session(spec, counts, stop_text)
        self.listener = listener
        self.cache = cache
        self.opened_at = now
        """Time of the opening."""
        self.phase = Phase.WAITING
        self._elder, self._timings, self._counts = elder, timings, counts
        self._adjustments: TextAdjustments | None = None
        """Changes to the logits. None: there are none."""
        if spec.sampling.has_adjustments:
            tree = self.generation.tree
            self._adjustments = TextAdjustments(spec.sampling, tree, len(spec.prompt_token_ids))
        self.reports = SessionReports(spec, stop_text)
        """The reports besides the tokens."""
        plan = target_plan(spec.speculation)
        self.retrieval = None if plan is None else SessionRetrieval(self.generation, plan, timings, tiers)
        """The retrieval on this side. None: there is none."""
        has_drafter = has_drafter and spec.speculation.method.has_draft_model
        self.choice = StrategyChoice(spec, timings)
        self.choice.set_attached(has_drafter)
        self.drafter = DrafterLink(
            self.generation,
            self.choice.strategy,
            timings,
            has_drafter=has_drafter,
            is_probing=self.choice.is_probing,
        )
        self.take_commits: Callable[[Sequence[TokenId]], object] | None = None
        """Called on the engine's thread with new committed tokens as soon as there are any. None: the listener tells
        the drafter."""
        parts = Parts(self.generation, cache, self.drafter, self.retrieval, self.reports, timings)
        self.round = Round(parts, self.choice.strategy, now, is_typical=False)  # it reads the prompt
        self.round.patience_ms = self._patience_ms()

    @property
    def spec(self) -> SessionSpec:
        """The request."""
        return self.generation.spec

    # Room in the pool, and the reader.

    @property
    def known_token_ids(self) -> Sequence[TokenId]:
        """Committed tokens, see `outrider.models.residency.Resident`."""
        return self.generation.committed

    def enter(self, now: float) -> None:
        """Begins the round, or begins it again: there is room now."""
        self.round.restart(now)
        if self.phase is Phase.WAITING:
            self.phase = Phase.RUNNING
        if self._elder is not None:
            # All but the last token of the prompt, whose logits are needed.
            self.cache.join(self._elder.cache, len(self.spec.prompt_token_ids) - 1)
            self._elder = None

    def pause(self) -> None:
        """Takes part in no further forward until `resume`."""
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        """Goes on after `pause`."""
        self.phase = Phase.RUNNING

    # From the drafter.

    def opening(self) -> tuple[Steering, int] | None:
        """Returns what `GenerationListener.on_begun` is told. None means that the method leaves no choice."""
        if not self.choice.is_auto:
            return None
        params = None if self.choice.is_first else params_of(self.choice.strategy, self.spec.speculation)
        return Steering(params), self.drafter.max_forward_us

    def attach(self, forward_us: int = 0) -> None:
        """Takes up a stream of the drafter's; see `DrafterLink.attach`."""
        if self.reports.drafts is not None:
            self.reports.drafts.forget_commits()
        self.choice.set_attached(True)
        self._timings.set_draft_ms(forward_us / 1e3)
        self._follow_choice()
        if self.drafter.attach(forward_us):
            self.choice.hold_drafts()
            self._follow_choice()

    def detach(self, peer: Peer, absence: Absence) -> None:
        """Goes on without the drafter; see `DrafterLink.detach`."""
        self.drafter.detach(peer, absence)
        self.choice.set_attached(False)
        self._follow_choice()
        # No draft comes any more that this round could wait for.
        self.round.patience_ms = min(self.round.patience_ms, self._patience_ms())

    def add_draft(self, draft: Draft, now: float, arrived_at: float | None = None) -> None:
        """Takes in new nodes of the drafter's tree. They arrived earlier than `now` if a forward was running."""
        arrived_at = now if arrived_at is None else arrived_at
        if self.reports.drafts is not None:
            self.reports.drafts.add(draft, arrived_at)
        self.round.answer(draft.base_len)
        time = self.drafter.add_draft(draft, now, arrived_at)
        if time is not None:
            self._counts.draft_latencies.add(time.draft_latency_ms / 1e3)

    # From the datastore.

    def add_continuation(self, base_len: int, continuation: Continuation, now: float) -> Question | None:
        """Takes in what the datastore has found for the first base_len tokens, possibly nothing.

        Returns:
            What to ask it next; None means nothing.
        """
        statistics = self.generation.statistics
        statistics.missing.find(Peer.DATASTORE)
        is_awaited = self.retrieval is not None and self.retrieval.add(base_len, continuation)
        # `answer` stands first because it must see every answer, awaited or not.
        if self.round.answer(base_len) and is_awaited and statistics.num_rounds:
            self._timings.datastore_ms.add((now - self.round.began_at) * 1e3)
        return self._take_question()

    def lose_datastore(self, absence: Absence) -> None:
        """Goes on with what is known in process, as the datastore does not answer."""
        self.generation.statistics.missing.miss(Peer.DATASTORE, absence)
        if self.retrieval is not None:
            self.retrieval.lose()
        self.round.patience_ms = self._patience_ms()

    # To the peers.

    def peer_requests(self) -> PeerRequests:
        """Returns what to send to the peers after a round. What is returned here is not returned again."""
        return PeerRequests(self._take_question(), self.drafter.next_steering())

    def _take_question(self) -> Question | None:
        if self.retrieval is None or not self.choice.strategy.retrieval:
            return None
        return self.retrieval.take_question()

    # The round.

    @property
    def can_follow_draw(self) -> bool:
        """True if the next round can be launched before the host knows what this one draws: both are plain, and only
        the drawn token is read of this one's logits. Anything else would be waited for until the next forward has
        ended."""
        report = self.spec.report
        reads_logits = self.round.num_prompt_rows or (report.logprobs is not None and report.logprobs_mode.is_processed)
        return not self.round.nodes and self.generation.is_as_drawn and self.choice.goes_on_plain and not reads_logits

    def adjustments(self) -> list[Adjustment | None]:
        """Returns for each row of the round how its logits are changed before a token is drawn; empty if none is
        changed."""
        if self._adjustments is None:
            return []
        return [self._adjustments.behind(node) for node in (self.generation.tree.root, *self.round.nodes)]

    @property
    def wants_next_tokens(self) -> bool:
        """True if `settle` should be given the most probable next tokens of every row."""
        return self.retrieval is not None and self.retrieval.wants_next_tokens

    def settle(
        self,
        draws: Sequence[TokenId],
        forward: Forward,
        next_tokens: Sequence[Sequence[Follower]] = (),
        *,
        is_ahead: bool = False,
    ) -> Verdict:
        """Commits what the target's draws decide, and makes the next round.

        Args:
            draws: The target's token for each row with logits.
            forward: The forward that they come of.
            next_tokens: The most probable ones of each row with their weights, if the session wants them.
            is_ahead: True if the row of the next round is in the cache already.
        """
        round_ = self.round
        verdict = round_.settle(draws, next_tokens, is_ahead=is_ahead)
        times = round_.times(forward)
        self._count(verdict, times)
        self._choose(verdict, times)
        verdict = self.reports.complete(verdict, round_.strategy.method, round_.nodes, times, forward.num_rows)
        # A round that is launched already is plain, whatever has just been chosen: it is no evidence about that choice.
        is_typical = not is_ahead or self.choice.strategy.is_plain
        self.round = round_.next(self.choice.strategy, forward.ended, is_typical=is_typical)
        if self.reports.drafts is not None and self.drafter.is_attached:
            self.reports.drafts.commit(len(self.generation.committed), forward.ended)
        self.drafter.time_answer(forward.ended)
        # Known now: the datastore's answer is waited for only if it is asked.
        self.round.patience_ms = self._patience_ms()
        return verdict

    def _count(self, verdict: Verdict, times: RoundTime) -> None:
        """Counts the round that ends, and its times."""
        round_, statistics = self.round, self.generation.statistics
        statistics.round_times.append(times)
        statistics.missing.end_round()
        is_first = statistics.num_rounds == 1  # this round is counted already
        self._counts.add_round(self.spec, round_.strategy.method, verdict, round_.why_empty, is_first=is_first)
        self._counts.add_times(times, is_first=is_first, has_waited=round_.waiting_since is not None)

    # The strategy.

    def _patience_ms(self) -> float:
        """Returns how long a draft or a continuation is worth waiting for after a commit, in milliseconds."""
        # The last token is the target's own: no chain fits before it.
        if self.generation.num_wanted <= 1:
            return 0.0
        if self.drafter.state is Link.PENDING and self.choice.is_probing:
            return 0.0  # reading may take many rounds: not worth waiting for while the drafter's value is unknown
        if self.drafter.is_drafting:
            return self.drafter.patience_ms()
        if self.retrieval is not None and self.choice.strategy.retrieval:
            return self.retrieval.patience_ms()
        return 0.0

    def _follow_choice(self) -> None:
        """Applies the chosen strategy at once, in the current round too: a drafter has come or gone."""
        self.round.strategy = self.choice.strategy
        self.drafter.follow(self.choice.strategy)

    def _choose(self, verdict: Verdict, times: RoundTime) -> None:
        """Learns from the round that ends, and chooses the strategy of the next one."""
        is_typical, choice = self.round.is_typical, self.choice
        if is_typical and not choice.is_probing:
            self._timings.add_overhead(times.overhead_ms)
        if choice.is_auto:
            if is_typical:
                is_pending = self.drafter.state is Link.PENDING
                choice.observe(len(verdict.token_ids), times.round_ms, is_pending=is_pending)
            choice.choose()
            self.drafter.follow(choice.strategy)
        if verdict.finish_reason is not None:
            self.generation.statistics.decisions = choice.decisions()
