"""The internals of both services under a simulated clock: the worth of a method, with the same times on every machine.

The draft model, the policies that grow the tree, and the verifier's sessions with their waits and rows are real. The
times of forwards and messages are made up. Under the match rule the target's text does not depend on drafts, so it is
computed beforehand, and forwards only take their time. Under the ratio rule, and if the target's logits are needed, a
target is given and runs.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from outrider.core.acceptance import decides_by_ratio
from outrider.core.auto.strategies import opening_params
from outrider.core.calibration import DraftCalibration
from outrider.core.costs import ForwardTimes
from outrider.core.departure import PairTimes, is_worth_waiting
from outrider.core.growth import Candidate, Expansion
from outrider.core.params import OWN_SOURCES, SamplingParams
from outrider.core.retrieval.ngrams import Follower
from outrider.core.retrieval.plan import MAX_RUN_LEN
from outrider.core.retrieval.recycling import NUM_NEXT
from outrider.core.retrieval.retriever import NO_COPIES, TierSource
from outrider.core.retrieval.ring import TokenRing
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.statistics import Statistics
from outrider.core.tree import Node
from outrider.models.acceptance import candidates, emitted
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.loading import LoadedModel
from outrider.models.runner import KVCache, Segment
from outrider.models.sampling import Sampler, most_probable
from outrider.rounds.timings import Activity, EngineTimings
from outrider.speculator.session import DraftSession, DraftSessionSpec
from outrider.verifier.flight import round_of, wanted_temperatures
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.round import Forward
from outrider.verifier.scheduler import ready_sessions
from outrider.verifier.session import VerifySession
from outrider_bench.costs import Costs

NO_CONTENT = KVPool(
    CacheShape(num_layers=1, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu")), num_blocks=1024
)
STEP_MS = 0.05
"""Minimum time after which a waiting target checks again. It checks when something happens."""
MAX_ROWS = 256
"""Maximum rows of a target forward, which sessions share equally: the default of a verifier."""


@dataclass(slots=True)
class Outcome:
    """Totals of all generations of a simulation."""

    num_tokens: int = 0
    time_ms: float = 0.0
    rounds: list[Statistics] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return 1e3 * self.num_tokens / self.time_ms

    @property
    def hit_rate(self) -> float:
        """Share of the rounds after which the mirror had the next token."""
        return sum(each.num_hits for each in self.rounds) / sum(each.num_rounds for each in self.rounds)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per target forward."""
        return self.num_tokens / sum(each.num_rounds for each in self.rounds)


class Mail:
    """Holds messages on their way."""

    def __init__(self, one_way_ms: float) -> None:
        self._one_way_ms = one_way_ms
        self._heap: list[tuple[float, int, Any]] = []
        self._num_sent = 0

    def send(self, now: float, item: Any) -> None:
        self._num_sent += 1
        heapq.heappush(self._heap, (now + self._one_way_ms, self._num_sent, item))

    @property
    def next_at(self) -> float:
        """Time at which the next one arrives; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, until: float) -> list[tuple[float, Any]]:
        """Takes the messages that have arrived, with their time."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            at, _, item = heapq.heappop(self._heap)
            taken.append((at, item))
        return taken


@dataclass(frozen=True, slots=True)
class _Commit:
    """Tells the speculator what was committed."""

    token_ids: tuple[int, ...]
    acknowledged_node_id: int
    """Latest node that had arrived by then; 0 if none had."""


class Speculator:
    """Runs the draft model: one packed forward after another, with commits between them."""

    def __init__(self, model: LoadedModel, costs: Costs, inbox: Mail, outbox: Mail) -> None:
        self.sessions: dict[str, DraftSession] = {}
        """Sessions that it drafts for."""
        self.times = PairTimes()
        self.num_forwards = 0
        self.policy_ms = 0.0
        """Real CPU time of everything except the draft model: growing trees, and choosing what is sent."""
        self._runner, self._costs = model.runner, costs
        self._inbox, self._outbox = inbox, outbox
        self._sampler = Sampler()
        self._now = 0.0
        self._running: tuple[float, float, list[_Growth]] | None = None

    @property
    def busy_until(self) -> float:
        """Time at which the running forward will end; infinity if none runs."""
        return self._running[0] if self._running is not None else float("inf")

    def run_until(self, until: float) -> None:
        """Advances to a time; a forward that ends later keeps running."""
        began = time.thread_time()
        self._live_until(until)
        self.policy_ms += 1e3 * (time.thread_time() - began)

    def _live_until(self, until: float) -> None:
        while True:
            if self._running is not None:
                end, forward_ms, growths = self._running
                if end > until:
                    return
                self._now, self._running = end, None
                for session_id, expansion, found in growths:
                    if session_id in self.sessions:
                        self.sessions[session_id].grow(expansion, found, 1e3 * forward_ms)
                        self._send(session_id)
                self.times.draft_us.add(1e3 * forward_ms)
                self._end_drafts()
            for _, (session_id, item) in self._inbox.take(self._now):
                self._take(session_id, item)
            if not self._begin_forward():
                if self._inbox.next_at > until:
                    self._now = max(self._now, until)
                    return
                self._now = max(self._now, self._inbox.next_at)
            elif self._now > until:
                return

    def _end_drafts(self) -> None:
        """Ends the drafts that the target waits for if another forward is not worth its time."""
        awaited = [one.awaited_draft() for one in self.sessions.values()]
        drafts = [draft for draft in awaited if draft is not None]
        if drafts and not is_worth_waiting(drafts, self.times.draft_us.get(0.0)):
            for session_id, one in self.sessions.items():
                if one.awaited_draft() is not None:
                    one.end_draft()
                    self._send(session_id)

    def _take(self, session_id: str, item: _Commit | Steering) -> None:
        drafting = self.sessions.get(session_id)
        if drafting is None:
            return  # its generation has ended meanwhile
        if isinstance(item, Steering):
            drafting.steer(item)
        else:
            drafting.commit(item.token_ids, item.acknowledged_node_id)
            self._send(session_id)

    def _begin_forward(self) -> bool:
        wanted = [(session_id, one, one.next_expansion()) for session_id, one in self.sessions.items()]
        growing = [(session_id, one, one.with_phrase(each)) for session_id, one, each in wanted if each is not None]
        if not growing:
            return False
        self.num_forwards += 1
        began = time.thread_time()
        logits = self._runner.forward([one.segment(expansion, 4096) for _, one, expansion in growing])
        indices = [one.output_indices(expansion) for _, one, expansion in growing]
        found = candidates(
            self._sampler,
            logits,
            [one.ranking for (_, one, _), own in zip(growing, indices, strict=True) for _ in own],
            [index for own in indices for index in own],
            [draw for _, one, expansion in growing for draw in one.draws(expansion)],
            max(expansion.num_children for _, _, expansion in growing),
            [one.has_raw_scores for (_, one, _), own in zip(growing, indices, strict=True) for _ in own],
        )
        self.policy_ms -= 1e3 * (time.thread_time() - began)
        rows = iter(found)
        growths: list[_Growth] = [
            (session_id, expansion, [row[: expansion.num_children] for row in islice(rows, len(own))])
            for (session_id, _, expansion), own in zip(growing, indices, strict=True)
        ]
        forward_ms = self._costs.draft_ms + self._costs.draft_row_ms * len(found)
        self._running = self._now + forward_ms, forward_ms, growths
        return True

    def _send(self, session_id: str) -> None:
        drafting = self.sessions[session_id]
        message = drafting.take_message(is_idle=drafting.next_expansion() is None)
        if message is not None:
            self._outbox.send(self._now, (session_id, message))


_Growth = tuple[str, Expansion, Sequence[Sequence[Candidate]]]


class Simulation:
    """A verifier and a speculator that run many generations."""

    def __init__(
        self,
        draft: LoadedModel,
        costs: Costs,
        target: LoadedModel | None = None,
        tiers: TierSource | None = None,
        on_verdict: Callable[[str, Verdict], None] | None = None,
        ring: TokenRing | None = None,
    ) -> None:
        """
        Args:
            draft: The draft model.
            costs: Times of forwards and messages.
            target: Runs if drafts decide the text, as under the ratio rule, and if a source learns from its rows. None
                means that neither is the case.
            tiers: Copies of a datastore's tiers, for both sides. None means that there is no datastore.
            on_verdict: Called after each round of a generation, with its number as text: 1 for the first.
            ring: A datastore's ring, which answers after a round trip and takes in what generations contribute. None
                means that nothing is asked.
        """
        self._on_verdict, self._ring = on_verdict, ring
        self._answers = Mail(2 * costs.one_way_ms)
        self._draft, self._costs, self._target, self._tiers = draft, costs, target, tiers
        self._times = ForwardTimes(costs.target_ms)
        self._timings = EngineTimings(ForwardTimes(costs.target_ms))
        self._claims, self._sampler = DraftCalibration(), Sampler()
        self._commits, self._drafts = Mail(costs.one_way_ms), Mail(costs.one_way_ms)
        self._speculator = Speculator(draft, costs, self._commits, self._drafts)
        self._now = 0.0
        self._jobs: dict[str, VerifySession] = {}
        self._texts: dict[str, Sequence[int]] = {}
        self._last_node_ids: dict[str, int] = {}
        self._num_begun = 0

    @property
    def policy_ms(self) -> float:
        """Real CPU time per forward of the draft model, besides the forward itself, in milliseconds."""
        return self._speculator.policy_ms / max(1, self._speculator.num_forwards)

    @property
    def num_draft_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return self._speculator.num_forwards

    def generate(
        self, prompt: Sequence[int], text: Sequence[int], sampling: SamplingParams, params: SpeculationParams
    ) -> tuple[float, Statistics]:
        """Runs one generation of `text`, without prefill; returns its time in milliseconds, and its statistics.

        `text` is longer than the generation by a whole chain and one token, for drafts beyond the end. Under the ratio
        rule only its length counts.
        """
        time_ms, (statistics,) = self.run([(prompt, text, sampling)], params)
        return time_ms, statistics

    def run(
        self,
        requests: Sequence[tuple[Sequence[int], Sequence[int], SamplingParams]],
        params: SpeculationParams,
        num_at_once: int = 1,
    ) -> tuple[float, list[Statistics]]:
        """Runs generations as `generate` runs one, so many at once; the next begins when one ends.

        Returns:
            The total time in milliseconds, and the statistics of each.
        """
        started, statistics = self._now, dict[str, Statistics]()
        waiting = deque(requests)
        while waiting or self._jobs:
            while waiting and len(self._jobs) < num_at_once:
                session_id = self._begin(*waiting.popleft(), params)
                statistics[session_id] = self._jobs[session_id].generation.statistics
            self._step(self._wait())
        return self._now - started, list(statistics.values())

    def _begin(
        self, prompt: Sequence[int], text: Sequence[int], sampling: SamplingParams, params: SpeculationParams
    ) -> str:
        self._num_begun += 1
        session_id = str(self._num_begun)
        num_tokens = len(text) - params.num_speculative_tokens - 1
        spec = SessionSpec(session_id, tuple(prompt), sampling, params, self._draft.vocab_size, num_tokens)
        self._set_sessions(num_more=1)
        cache = self._target_cache(spec)
        tiers = NO_COPIES if self._tiers is None and self._ring is not None else self._tiers
        job = VerifySession(spec, _Silent(), cache, self._timings, RoundCounts(), tiers, self._now / 1e3)
        self._jobs[session_id], self._texts[session_id] = job, text
        # As a verifier does for every session before its first round.
        self._ask(session_id, (), self._now)
        if params.method.has_draft_model:
            opening = job.opening()
            is_wanted = opening is None or not opening[0].is_pause
            self._speculator.sessions[session_id] = self._drafting(spec, begins_paused=not is_wanted)
        return session_id

    def _wait(self) -> Sequence[VerifySession]:
        """Advances to the next round; returns the sessions that take part in it."""
        while True:
            self._run_until(self._now)
            forward_ms = self._timings.forward_ms.get(0.0)
            ready, wait_s = ready_sessions(self._jobs.values(), self._now / 1e3, forward_ms, nullcontext)
            if ready:
                return ready
            mails = (self._drafts, self._answers, self._commits)
            events = [*(mail.next_at for mail in mails), self._speculator.busy_until, self._now + 1e3 * (wait_s or 0.0)]
            later = [event for event in events if event > self._now]
            self._now = max(self._now + STEP_MS, min(later, default=self._now))

    def _run_until(self, until: float) -> None:
        self._speculator.run_until(until)
        for at, (session_id, draft) in self._drafts.take(until):
            if session_id in self._jobs:
                self._jobs[session_id].add_draft(draft, at / 1e3)
                self._last_node_ids[session_id] = draft.first_node_id + len(draft.token_ids) - 1
        while answers := self._answers.take(until):
            for at, (session_id, base_len, continuation) in answers:
                if session_id in self._jobs:
                    question = self._jobs[session_id].add_continuation(base_len, continuation, at / 1e3)
                    if question is not None:
                        self._ask(session_id, question, at)

    def _ask(self, session_id: str, behind: Sequence[int], now: float) -> None:
        """Asks the ring what follows the committed tokens and the tokens `behind` them."""
        session = self._jobs[session_id].generation
        plan = target_plan(session.spec.speculation)
        if self._ring is None or plan is None:
            return
        context = [*session.committed[-plan.context_len :], *behind][-plan.context_len :]
        is_whole = plan.whole_run_len > 0
        max_len = plan.whole_run_len if is_whole else MAX_RUN_LEN
        found = self._ring.lookup(context, plan.max_match_len, max_len, whole_runs=is_whole)
        self._answers.send(now, (session_id, len(session.committed) + len(behind), found))

    def _step(self, work: Sequence[VerifySession]) -> None:
        """Runs one forward of the target for these sessions."""
        max_num_nodes = max(0, MAX_ROWS // len(work) - 1)
        segments = [job.round.segment(4096, max_num_nodes) for job in work]
        started = self._now
        end = started + self._times.of(sum(len(segment.token_ids) for segment in segments))
        forward = Forward(started / 1e3, end / 1e3, end - started)
        self._run_until(end)
        for job, segment in zip(work, segments, strict=True):
            draws, next_tokens = self._draws_of(job, segment)
            verdict = job.settle(draws, forward, next_tokens)
            session_id = job.spec.session_id
            if self._on_verdict is not None:
                self._on_verdict(session_id, verdict)
            if verdict.finish_reason is not None:
                self._end(session_id)
                continue
            commit = _Commit(verdict.token_ids, self._last_node_ids.get(session_id, 0))
            self._commits.send(end, (session_id, commit))
            requests = job.peer_requests()
            if requests.steering is not None:
                self._commits.send(end, (session_id, requests.steering))
            if requests.question is not None:
                self._ask(session_id, requests.question, end)
        jobs = (*work, *(job for job in self._jobs.values() if job not in work and not job.round.is_prefilling))
        shares = [job.choice.take_share() for job in jobs if job.choice.is_auto]
        is_decoding = all(len(segment.token_ids) == segment.num_logits for segment in segments)
        self._timings.end_step(shares, end / 1e3, is_typical=is_decoding)
        self._set_sessions()
        self._now = end + self._costs.overhead_ms

    def _set_sessions(self, num_more: int = 0) -> None:
        activities = [Activity.of(job.choice.strategy) for job in self._jobs.values()]
        self._timings.set_sessions([*activities, *[Activity.NONE] * num_more])

    def _end(self, session_id: str) -> None:
        job = self._jobs.pop(session_id)
        job.cache.clear()
        if self._ring is not None and job.spec.speculation.contribute:
            self._ring.append(job.generation.committed)
        del self._texts[session_id]
        self._last_node_ids.pop(session_id, None)
        drafting = self._speculator.sessions.pop(session_id, None)
        if drafting is not None:
            drafting.cache.clear()

    def _draws_of(self, job: VerifySession, segment: Segment) -> tuple[list[int], list[list[Follower]]]:
        """Returns the target's draw for each row with logits, and the most probable tokens if they are wanted."""
        generation, cache = job.generation, job.cache
        if _runs_target(generation.spec):
            assert self._target is not None
            logits = self._target.runner.forward([segment])
            (draws,) = emitted(self._sampler, logits, [round_of(job)])
            return draws, most_probable(logits, wanted_temperatures(job), NUM_NEXT)
        cache.reserve(cache.length + len(segment.token_ids))
        cache.append(segment.position_ids or range(cache.length, cache.length + len(segment.token_ids)))
        text = self._texts[generation.spec.session_id][generation.num_output_tokens :]
        return _draws(generation.tree.root, job.round.nodes, text), []

    def _target_cache(self, spec: SessionSpec) -> KVCache:
        """Returns a cache with the prompt except its last token; without content if no target runs."""
        prompt = spec.prompt_token_ids
        if _runs_target(spec):
            if self._target is None:
                raise ValueError(
                    "a target must be given for the ratio rule, under which drafts decide the text, and for sources "
                    "that learn from its rows"
                )
            cache = self._target.runner.new_cache()
            if len(prompt) > 1:
                self._target.runner.forward([Segment(cache, prompt[:-1], num_logits=0)])
            return cache
        cache = NO_CONTENT.new_cache()
        if len(prompt) > 1:
            cache.reserve(len(prompt) - 1)
            cache.append(range(len(prompt) - 1))
        return cache

    def _drafting(self, spec: SessionSpec, *, begins_paused: bool) -> DraftSession:
        prompt, vocab_size = spec.prompt_token_ids, spec.vocab_size
        params = opening_params(spec.speculation)
        drafting = DraftSessionSpec(
            spec.session_id, prompt, len(prompt), spec.sampling, params, vocab_size, begins_paused
        )
        cache = self._draft.runner.new_cache()
        return DraftSession(
            drafting,
            cache,
            self._draft.max_context_len,
            tiers=self._tiers,
            draft_calibration=self._claims,
            times=self._speculator.times,
        )


def _runs_target(spec: SessionSpec) -> bool:
    learns_from_rows = any(source in OWN_SOURCES for source in spec.speculation.sources)
    return learns_from_rows or decides_by_ratio(spec.sampling, spec.speculation)


class _Silent:
    """Ignores all calls."""

    def on_begun(self, steering: object, max_forward_us: int) -> None: ...
    def on_verdict(self, verdict: object, statistics: object, requests: object) -> None: ...
    def on_admitted(self, num_cached_tokens: int) -> None: ...

    def on_news(self, news: object) -> None: ...

    def on_no_room(self) -> None: ...

    def on_broken(self, reason: str) -> None: ...

    def on_failure(self, is_own: bool) -> None: ...


def text_of(model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Returns a target's text, by plain decoding."""
    cache, sampler = model.runner.new_cache(), Sampler()
    pending, text = list(prompt), list[int]()
    for index in range(num_tokens):
        pending = sampler.draw(model.runner.forward([Segment(cache, pending, 1)]), [sampling], [index])
        text += pending
    return text


def _draws(root: Node, nodes: Sequence[Node], text: Sequence[int]) -> list[int]:
    """Returns the target's draw for the root and for each node; draws off the text's path are never used."""
    depths, draws = {root: 0}, [text[0]]
    for node in nodes:
        parent_depth = depths.get(node.parent) if node.parent is not None else None
        if parent_depth is not None and text[parent_depth] == node.token_id:
            depths[node] = parent_depth + 1
            draws.append(text[parent_depth + 1])
        else:
            draws.append(-1)
    return draws
