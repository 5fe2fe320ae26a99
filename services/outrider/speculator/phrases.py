"""Retrieved phrases behind a draft chain: one draft forward verifies several tokens (DOUBLE, section 4.1).

A phrase costs rows of a forward. How long it is follows from how much of the last ones was accepted; where nothing is,
forwards go without one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.core.calibration import RetrievalCalibration, RetrievalKey
from outrider.core.params import SamplingParams
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.retriever import Retriever, TierSource
from outrider.core.statistics import RunningMean
from outrider.core.tree import DraftTree, Node, TokenId

MIN_PHRASE_LEN = 2
"""As many are looked up where phrases are never accepted; three times what is accepted more, otherwise."""
MAX_SKIPPED = 5
"""After each phrase that was refused altogether one more forward goes without; so many at most."""
MIN_PHRASE_PROBABILITY = 0.2
"""A phrase ends where its path is less probable: a row costs about a fifth of a forward of its own."""


class Phrases:
    """Of one session. Owned by the engine's thread."""

    def __init__(
        self,
        tree: DraftTree,
        num_prompt_tokens: int,
        ranking: SamplingParams,
        calibration: RetrievalCalibration,
        tiers: TierSource | None,
    ) -> None:
        """Without a plan at first (`use`). `ranking` is how the draft model ranks; `tiers` are copies of a datastore's,
        None = there is none."""
        self._tree, self._num_prompt_tokens, self._ranking = tree, num_prompt_tokens, ranking
        self._calibration, self._source = calibration, tiers
        self._plan: RetrievalPlan | None = None
        self._retriever: Retriever | None = None
        self._retriever_plan: RetrievalPlan | None = None
        self._keys: list[RetrievalKey] = []
        self._num_accepted = RunningMean()
        self._num_refused = self._num_skipped = 0
        self._spent_s = 0.0

    def use(self, plan: RetrievalPlan | None) -> None:
        """Looks up like this from here on; None = nothing."""
        self._plan = plan
        if plan is not None and not _is_alike(plan, self._retriever_plan):
            self._retriever = Retriever(
                self._tree.committed, self._num_prompt_tokens, self._ranking, self._calibration, self._source, plan
            )
            self._retriever_plan = plan

    def commit(self, token_ids: Sequence[TokenId]) -> None:
        """Tells the tiers what the target said, and what it said it in place of; before the tree is told."""
        if self._retriever is None:
            return
        started = time.perf_counter()
        node, known = self._tree.root, 0
        while known < len(token_ids) and token_ids[known] in node.children:
            node = node.children[token_ids[known]]
            known += 1
        is_refused = known < len(token_ids) and bool(node.children)
        self._retriever.commit(token_ids, next(iter(node.children)) if is_refused else None, known)
        self._spent_s += time.perf_counter() - started

    def behind(self, tip: Node, room: int) -> tuple[TokenId, ...]:
        """At most `room` tokens that may follow a node; none if nothing is known, or phrases are not worth it now."""
        if self._plan is None or self._retriever is None:
            return ()
        if self._num_skipped < self._num_refused:
            self._num_skipped += 1
            return ()
        worth = int(MIN_PHRASE_LEN + 3 * self._num_accepted.get(1.0))
        max_len = min(worth, self._plan.max_phrase_len, room)
        if max_len < 1:
            return ()
        started = time.perf_counter()
        phrase, self._keys = self._retriever.phrase(tip, max_len, MIN_PHRASE_PROBABILITY)
        self._spent_s += time.perf_counter() - started
        return tuple(phrase)

    def judge(self, num_accepted: int) -> None:
        """The draft model has accepted so many tokens of the last phrase."""
        assert self._retriever is not None
        self._retriever.judge_phrase(self._keys, num_accepted)
        self._num_accepted.add(num_accepted)
        self._num_refused = 0 if num_accepted else min(self._num_refused + 1, MAX_SKIPPED)
        self._num_skipped = 0

    def take_spent_us(self) -> int:
        """Time that lookups have taken since the last call, learning from commits included, in microseconds."""
        spent_us, self._spent_s = int(self._spent_s * 1e6), 0.0
        return spent_us


def _is_alike(plan: RetrievalPlan, known: RetrievalPlan | None) -> bool:
    """Whether the tiers of one plan serve the other."""
    return known is not None and (plan.max_match_len, set(plan.tiers)) == (known.max_match_len, set(known.tiers))
