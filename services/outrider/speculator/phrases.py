"""Retrieved phrases after a draft chain: one draft forward verifies several tokens (DOUBLE, section 4.1).

A phrase costs rows of a forward. Its length follows from how much of the last ones was accepted; where nothing is,
forwards go without a phrase for a while.
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
"""Tokens of a phrase where none has been accepted so far. Three times the mean that is accepted come on top."""
MAX_SKIPPED = 5
"""After each phrase that was refused altogether, one more forward goes without; this is the most."""
MIN_PHRASE_PROBABILITY = 0.2
"""A phrase ends where its path is less probable. One more row in a forward costs about a fifth of another forward, so
a token pays only if it is accepted at least that often."""

MAX_REJECTED_LEN = 16
"""Tokens of a refuted path that are recorded; what follows is drafted ever farther from the text."""


class Phrases:
    """Looks phrases up for one session, and learns how long they should be. Owned by the engine's thread."""

    def __init__(
        self,
        tree: DraftTree,
        num_prompt_tokens: int,
        ranking: SamplingParams,
        calibration: RetrievalCalibration,
        tiers: TierSource | None,
    ) -> None:
        """Begins without a plan, and so without phrases (`use`).

        Args:
            tree: Draft tree of the session.
            num_prompt_tokens: Tokens at the start of the tree's committed tokens that are the prompt.
            ranking: Parameters by which the draft model ranks its candidates; retrieved tokens are ranked alike.
            calibration: Rates at which the target agrees, shared by all sessions.
            tiers: Copies of a datastore's tiers; None means that there is no datastore.
        """
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
        """Looks up by this plan from here on; None means not at all."""
        self._plan = plan
        # A new retriever indexes the whole text again, so the old one is kept where it serves.
        if plan is not None and not _is_alike(plan, self._retriever_plan):
            self._retriever = Retriever(
                self._tree.committed, self._num_prompt_tokens, self._ranking, self._calibration, self._source, plan
            )
            self._retriever_plan = plan

    @property
    def is_used(self) -> bool:
        """True if phrases are looked up."""
        return self._plan is not None and self._retriever is not None

    def commit(self, token_ids: Sequence[TokenId]) -> None:
        """Records committed tokens in the tiers, and the drafted path that they refute, before the tree takes them."""
        # Even while no plan is in use: tiers that have missed a commit could not be used again.
        if self._retriever is None:
            return
        started = time.perf_counter()
        node, known = self._tree.root, 0
        while known < len(token_ids) and token_ids[known] in node.children:
            node = node.children[token_ids[known]]
            known += 1
        rejected: list[TokenId] = []
        while known < len(token_ids) and node.children and len(rejected) < MAX_REJECTED_LEN:
            node = next(iter(node.children.values()))
            rejected.append(node.token_id)
        self._retriever.commit(token_ids, rejected, known)
        self._spent_s += time.perf_counter() - started

    def behind(self, tip: Node, room: int) -> tuple[TokenId, ...]:
        """Looks up at most `room` tokens that may follow a node; returns none where phrases do not pay at present."""
        if self._plan is None or self._retriever is None:
            return ()
        max_len, least = min(self._plan.max_phrase_len, room), 0.0
        if self._plan.is_calibrated:
            if self._num_skipped < self._num_refused:
                self._num_skipped += 1
                return ()
            max_len = min(max_len, int(MIN_PHRASE_LEN + 3 * self._num_accepted.get(1.0)))
            least = MIN_PHRASE_PROBABILITY
        if max_len < 1:
            return ()
        started = time.perf_counter()
        # One set of keys is enough: a session has one forward at a time, and `judge` is about the last phrase.
        phrase, self._keys = self._retriever.phrase(tip, max_len, least)
        self._spent_s += time.perf_counter() - started
        return tuple(phrase)

    def judge(self, num_accepted: int) -> None:
        """Learns how many tokens of the last phrase the draft model has drawn itself."""
        assert self._retriever is not None
        self._retriever.judge_phrase(self._keys, num_accepted)
        self._num_accepted.add(num_accepted)
        self._num_refused = 0 if num_accepted else min(self._num_refused + 1, MAX_SKIPPED)
        self._num_skipped = 0

    def take_spent_us(self) -> int:
        """Returns the microseconds spent on lookups and on commits since the last call."""
        spent_us, self._spent_s = int(self._spent_s * 1e6), 0.0
        return spent_us


def _is_alike(plan: RetrievalPlan, known: RetrievalPlan | None) -> bool:
    """Returns True if the tiers that were filled for one plan serve the other."""
    return known is not None and (plan.max_match_len, plan.tiers) == (known.max_match_len, known.tiers)
