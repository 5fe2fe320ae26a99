"""Both services' insides under a simulated clock: what a method is worth where time is the same on every machine.

Real are the draft model, the policies that grow the tree, and the verifier's sessions with their waiting and their
rows. The times of forwards and messages are made up. Under the match rule what the target says does not depend on
drafts, so its text is computed beforehand, and its forwards only take their time; under the ratio rule, and where its
logits are looked at, a target is given and runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.core.acceptance import decides_by_ratio
from outrider.core.auto.strategies import opening_params
from outrider.core.calibration import DraftCalibration
from outrider.core.costs import ForwardTimes
from outrider.core.params import SamplingParams, SpeculationParams
from outrider.core.retrieval.retriever import TierSource
from outrider.core.session import SessionSpec
from outrider.core.statistics import Statistics
from outrider.core.tree import Node
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.loading import LoadedModel
from outrider.models.ratio import Round, candidates, emitted
from outrider.models.runner import KVCache, Segment
from outrider.models.sampling import Sampler
from outrider.speculator.session import DraftSession, DraftSessionSpec
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings

NO_CONTENT = KVPool(
    CacheShape(num_layers=1, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu")), num_blocks=256
)
STEP_MS = 0.05
"""How often a waiting target looks around."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in milliseconds."""

    target_ms: Mapping[int, float]
    """Of a forward, by its rows."""
    draft_ms: float
    draft_row_ms: float
    """Of a forward, and of each of its rows."""
    one_way_ms: float
    """Of a message."""
    overhead_ms: float
    """Of a round, beside its forward."""


@dataclass(slots=True)
class Outcome:
    """Sums up all generations of a simulation."""

    num_tokens: int = 0
    time_ms: float = 0.0
    rounds: list[Statistics] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """The tokens of a second."""
        return 1e3 * self.num_tokens / self.time_ms

    @property
    def hit_rate(self) -> float:
        """Share of the rounds after which the mirror had the next token."""
        return sum(each.num_hits for each in self.rounds) / sum(each.num_rounds for each in self.rounds)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens by forwards of the target."""
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
        """Time at which the next one arrives; infinity where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, until: float) -> list[tuple[float, Any]]:
        """Takes what has arrived, with its time."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            at, _, item = heapq.heappop(self._heap)
            taken.append((at, item))
        return taken


class Speculator:
    """Runs one session: forwards one after the other, commits between two of them."""

    def __init__(self, drafting: DraftSession, model: LoadedModel, costs: Costs, inbox: Mail, outbox: Mail) -> None:
        self._drafting, self._runner, self._costs = drafting, model.runner, costs
        self._inbox, self._outbox = inbox, outbox
        self._sampler = Sampler()
        self.num_forwards = 0
        self._now = 0.0
        self._running: tuple[float, Any, Any, float] | None = None

    def run_until(self, until: float) -> None:
        """Lets everything happen up to a moment; a forward that ends later goes on."""
        while True:
            if self._running is not None:
                end, expansion, found, forward_ms = self._running
                if end > until:
                    return
                self._now, self._running = end, None
                self._drafting.grow(expansion, found, 1e3 * forward_ms)
                self._send()
            for _, item in self._inbox.take(self._now):
                if isinstance(item, tuple):
                    self._drafting.commit(item)
                    self._send()
                else:
                    self._drafting.steer(item)
            if not self._begin_forward():
                if self._inbox.next_at > until:
                    self._now = max(self._now, until)
                    return
                self._now = max(self._now, self._inbox.next_at)
            elif self._now > until:
                return

    def _begin_forward(self) -> bool:
        drafting = self._drafting
        expansion = drafting.next_expansion()
        if expansion is None:
            return False
        self.num_forwards += 1
        expansion = drafting.with_phrase(expansion)
        segment = drafting.segment(expansion, 4096)
        logits = self._runner.forward([segment])
        indices, draws = drafting.output_indices(expansion), drafting.draws(expansion)
        params = [drafting.ranking] * len(indices)
        found = candidates(self._sampler, logits, params, indices, draws, expansion.num_children)
        forward_ms = self._costs.draft_ms + self._costs.draft_row_ms * len(expansion.nodes)
        self._running = self._now + forward_ms, expansion, found, forward_ms
        return True

    def _send(self) -> None:
        message = self._drafting.take_message(is_idle=self._drafting.next_expansion() is None)
        if message is not None:
            self._outbox.send(self._now, message)


class Simulation:
    """A verifier and a speculator that live through many generations, one after the other."""

    def __init__(
        self, draft: LoadedModel, costs: Costs, target: LoadedModel | None = None, tiers: TierSource | None = None
    ) -> None:
        """
        Args:
            draft: The draft model.
            costs: Times of forwards and messages.
            target: Runs where drafts decide the text, which is under the ratio rule. None means that they never do.
            tiers: Copies of a datastore's tiers, for both sides. None means that there is no datastore.
        """
        self._draft, self._costs, self._target, self._tiers = draft, costs, target, tiers
        self._times = ForwardTimes(costs.target_ms)
        self._timings = EngineTimings(ForwardTimes(costs.target_ms))
        self._claims, self._sampler = DraftCalibration(), Sampler()
        self.num_draft_forwards = 0
        """Forwards of the draft model for the latest generation."""

    def generate(
        self, prompt: Sequence[int], text: Sequence[int], sampling: SamplingParams, params: SpeculationParams
    ) -> tuple[float, Statistics]:
        """Runs one generation of `text`, prefill left out; returns its time in milliseconds, and what happened.

        `text` has a few tokens more than are generated, for what is drafted beyond the end. Under the ratio rule only
        its length counts.
        """
        num_tokens = len(text) - params.num_speculative_tokens - 1
        spec = SessionSpec("s", tuple(prompt), sampling, params, self._draft.vocab_size, num_tokens)
        cache = self._target_cache(spec)
        self._timings.set_num_sessions(1)
        job = VerifySession(spec, _Silent(), cache, self._timings, RoundCounts(), self._tiers, 0.0)
        is_real = job.session.decides_by_ratio
        commits, drafts = Mail(self._costs.one_way_ms), Mail(self._costs.one_way_ms)
        speculator = None
        if params.method.has_draft_model:
            opening = job.opening()
            is_wanted = opening is None or not opening[0].is_pause
            drafting = self._drafting(spec, begins_paused=not is_wanted)
            speculator = Speculator(drafting, self._draft, self._costs, commits, drafts)
        now = 0.0
        while job.session.finish_reason is None:
            now = _wait(job, speculator, drafts, now)
            position = job.session.num_output_tokens
            segment = job.segment(4096, 4096)
            end = now + self._times.of(len(segment.token_ids))
            _run(job, speculator, drafts, end)
            if is_real:
                draws = self._emitted(job, segment)
            else:
                cache.reserve(cache.length + len(segment.token_ids))
                cache.append(segment.position_ids or range(cache.length, cache.length + len(segment.token_ids)))
                draws = _draws(job.session.tree.root, job.nodes, text[position:])
            verdict = job.apply(draws, end - now, now / 1e3, end / 1e3)
            assert is_real or list(verdict.token_ids) == list(text[position : position + len(verdict.token_ids)])
            commits.send(end, verdict.token_ids)
            if (steering := job.peer_requests().steering) is not None:
                commits.send(end, steering)
            now = end + self._costs.overhead_ms
        self.num_draft_forwards = 0 if speculator is None else speculator.num_forwards
        return now, job.session.statistics

    def _target_cache(self, spec: SessionSpec) -> KVCache:
        """Returns a cache that has the prompt but for its last token: without content where no target runs."""
        prompt = spec.prompt_token_ids
        if decides_by_ratio(spec.sampling, spec.speculation):
            if self._target is None:
                raise ValueError("a target must be given for the ratio rule, under which drafts decide the text")
            cache = self._target.runner.new_cache()
            if len(prompt) > 1:
                self._target.runner.forward([Segment(cache, prompt[:-1], num_logits=0)])
            return cache
        cache = NO_CONTENT.new_cache()
        if len(prompt) > 1:
            cache.reserve(len(prompt) - 1)
            cache.append(range(len(prompt) - 1))
        return cache

    def _emitted(self, job: VerifySession, segment: Segment) -> list[int]:
        """Runs the target, and returns what the round emits."""
        assert self._target is not None
        generation = job.session
        first = generation.num_output_tokens
        wanted = Round(generation.spec.sampling, range(first, first + 1 + len(job.nodes)), job.nodes)
        return emitted(self._sampler, self._target.runner.forward([segment]), [wanted])[0]

    def _drafting(self, spec: SessionSpec, *, begins_paused: bool) -> DraftSession:
        prompt = spec.prompt_token_ids
        params = opening_params(spec.speculation)
        drafting = DraftSessionSpec("s", prompt, len(prompt), spec.sampling, params, spec.vocab_size, begins_paused)
        cache = self._draft.runner.new_cache()
        return DraftSession(
            drafting, cache, self._draft.max_context_len, tiers=self._tiers, draft_calibration=self._claims
        )


class _Silent:
    """Is told, and does nothing."""

    def on_begun(self, steering: object, max_forward_us: int) -> None: ...
    def on_verdict(self, verdict: object, statistics: object, requests: object) -> None: ...
    def on_admitted(self) -> None: ...

    def on_no_room(self) -> None: ...

    def on_failure(self) -> None: ...


def text_of(model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Returns what a target says, by plain decoding."""
    cache, sampler = model.runner.new_cache(), Sampler()
    pending, text = list(prompt), list[int]()
    for index in range(num_tokens):
        pending = sampler.draw(model.runner.forward([Segment(cache, pending, 1)]), [sampling], [index])
        text += pending
    return text


def _run(job: VerifySession, speculator: Speculator | None, drafts: Mail, until: float) -> None:
    if speculator is not None:
        speculator.run_until(until)
    for at, draft in drafts.take(until):
        job.add_draft(draft, at / 1e3)


def _wait(job: VerifySession, speculator: Speculator | None, drafts: Mail, now: float) -> float:
    """Returns the time at which the next round begins."""
    _run(job, speculator, drafts, now)
    while not job.is_ready(now / 1e3):
        now += STEP_MS
        _run(job, speculator, drafts, now)
    return now


def _draws(root: Node, nodes: Sequence[Node], text: Sequence[int]) -> list[int]:
    """Returns the target's draw for the root and for each node; nobody asks for those that leave the text's path."""
    depths, draws = {root: 0}, [text[0]]
    for node in nodes:
        parent_depth = depths.get(node.parent) if node.parent is not None else None
        if parent_depth is not None and text[parent_depth] == node.token_id:
            depths[node] = parent_depth + 1
            draws.append(text[parent_depth + 1])
        else:
            draws.append(-1)
    return draws
