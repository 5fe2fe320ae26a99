"""The steps of a batch: whose rows they are, what is drafted for them, how long that is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from outrider.core.params import Source
from outrider.core.session import Verdict
from outrider.core.tree import TokenId
from outrider.telemetry.metrics import Metrics, build_info, counter, counters
from outrider.vllm.budget import Budget
from outrider.vllm.draft_client import IDLE_S, Commit, DraftClient, Step
from outrider.vllm.drafted_row import Chain
from outrider.vllm.rows import RowTracker, Sighting, Tokens
from outrider.vllm.settings import ProposerSettings
from outrider.wire.handshake import Model


class Drafting:
    """Drafts for the batches of one vLLM. Owned by the thread of its engine."""

    def __init__(
        self,
        settings: ProposerSettings,
        model: Model,
        num_speculative_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            settings: The settings.
            model: The target.
            num_speculative_tokens: Most tokens of a chain.
            clock: Returns the time in seconds.
        """
        self._max_len, self._clock = model.max_context_len, clock
        self._max_patience_s = settings.patience_ms / 1e3
        self._rows, self._budget = RowTracker(), Budget(settings.patience_ms)
        self._ended_at = 0.0
        """Time at which the latest step's drafts were returned. 0: there was none."""
        self._given: dict[int, Chain] = {}
        """What the step that runs verifies, by session."""
        self._num_steps = 0
        self._waited_s = 0.0
        self._outcomes: Counter[str] = Counter()
        self._num_proposed: Counter[Source] = Counter()
        self._num_accepted: Counter[Source] = Counter()
        self._client = DraftClient(settings, model, num_speculative_tokens, self._count, clock)

    def propose(
        self, sampled: Sequence[Sequence[TokenId]], lengths: npt.NDArray[Any], token_ids: Tokens
    ) -> list[list[TokenId]]:
        """Takes in what a step has drawn, and returns what the next one should verify. The arguments are those of
        `RowTracker.observe`."""
        began_at = self._clock()
        forgotten = self._rows.clear() if began_at - self._ended_at > IDLE_S else []
        sightings, ended = self._rows.observe(sampled, lengths, token_ids)
        step_ms = self._step_ms(sightings, sampled, began_at)
        self._learn(sightings)
        commits = [Commit(each, self._nodes_of(each)) for each in sightings]
        self._client.hand_over(Step(commits, forgotten + ended, step_ms, self._budget.steps.forward_times))
        wanting = {row: each for row, each in enumerate(sightings) if sampled[row]}
        chains = self._await(list(wanting.values()), began_at)
        drafts: list[list[TokenId]] = [[] for _ in sightings]
        self._given = {}
        counts = self._budget.num_tokens([chain.probabilities for chain in chains])
        for (row, sighting), chain, count in zip(wanting.items(), chains, counts, strict=True):
            count = min(count, self._max_len - sighting.length - 1)
            if count > 0:
                self._given[sighting.number] = chain.beginning(count)
                drafts[row] = list(chain.token_ids[:count])
                self._num_proposed.update(node.source for node in chain.nodes[:count])
            self._outcomes["drafted" if count > 0 else "held back" if chain.nodes else "nothing drafted"] += 1
        self._num_steps += 1
        self._ended_at = self._clock()
        return drafts

    def _step_ms(self, sightings: Sequence[Sighting], sampled: Sequence[Sequence[TokenId]], now: float) -> float:
        """Returns the time of the step that has just ended, and learns from it; 0 if it has read prompts, or if vLLM
        had nothing to do before."""
        is_decoding = all(each.base_len and drawn for each, drawn in zip(sightings, sampled, strict=True))
        if not (is_decoding and self._ended_at and sightings):
            return 0.0
        step_ms = (now - self._ended_at) * 1e3
        num_rows = len(sightings) + sum(len(chain.nodes) for chain in self._given.values())
        self._budget.steps.observe(num_rows, step_ms)
        return step_ms

    def _learn(self, sightings: Sequence[Sighting]) -> None:
        given = [(each, self._given[each.number]) for each in sightings if each.number in self._given]
        expected = sum(sum(chain.probabilities) for _, chain in given)
        # The last token is the target's own.
        self._budget.learn(expected, sum(len(each.token_ids) - 1 for each, _ in given if each.token_ids))

    def _nodes_of(self, sighting: Sighting) -> Sequence[Any]:
        chain = self._given.get(sighting.number)
        return () if chain is None or chain.base_len != sighting.base_len else chain.nodes

    def _await(self, sightings: Sequence[Sighting], began_at: float) -> list[Chain]:
        """Returns a chain for each of them, possibly empty, as soon as enough have one."""
        if not self._client.may_draft:
            return [Chain(each.length) for each in sightings]
        last = began_at + self._max_patience_s
        # Until the loop has taken the step in, all chains follow older texts.
        while not self._client.is_up_to_date and self._client.wait(last):
            pass
        while True:
            chains = [self._chain_of(each) for each in sightings]
            wishes = [chain.wish_ms for chain in chains if not chain.nodes]
            patience_s = self._budget.patience_ms(len(chains), wishes) / 1e3
            if not patience_s or not self._client.wait(min(last, began_at + patience_s)):
                self._waited_s += self._clock() - began_at
                return chains

    def _chain_of(self, sighting: Sighting) -> Chain:
        chain = self._client.chain(sighting.number)
        is_current = chain is not None and chain.base_len == sighting.length
        return chain if chain is not None and is_current else Chain(sighting.length)

    def _count(self, verdict: Verdict) -> None:
        # On the loop, which alone writes this counter.
        self._num_accepted.update(source for source in verdict.sources if source is not Source.TARGET)

    def metrics(self) -> Metrics:
        """Yields the metrics. Safe to call in any thread."""
        yield build_info("vllm")
        yield counter("outrider_vllm_steps_total", "Steps that drafts were asked for.", self._num_steps)
        yield counter("outrider_vllm_wait_seconds_total", "Time that steps have waited for drafts.", self._waited_s)
        yield counters(
            "outrider_vllm_rows_total", "Rows of these steps by what was drafted.", "outcome", dict(self._outcomes)
        )
        for name, what, counts in (
            ("proposed", "Drafted tokens that vLLM was given", self._num_proposed),
            ("accepted", "Drafted tokens that the target has accepted", self._num_accepted),
        ):
            values = {source.name.lower(): number for source, number in list(counts.items())}
            yield counters(f"outrider_vllm_{name}_tokens_total", f"{what}, by their origin.", "source", values)
        yield from self._client.metrics()

    def close(self) -> None:
        """Ends all sessions."""
        self._client.close()
