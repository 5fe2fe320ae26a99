"""What is retrieved for one generation: what is known in process, and what the datastore is asked for.

The datastore is asked while a forward runs, and only for what is not known here. `spacelike` knows nothing here: it
asks after each commit that leaves no continuation, and before a continuation is used up it asks what comes behind that.
A datastore that finds nothing costs next to nothing: it is waited for as its answers are worth, and asked less often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.core.costs import DraftTimings, Waiting, patience_ms
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.retriever import MIN_MATCH_LEN, Retriever, TierSource
from outrider.core.session import Session, Verdict
from outrider.core.statistics import RunningMean
from outrider.core.tree import Node, TokenId
from outrider.verifier.measurements import EngineTimings

Question = tuple[TokenId, ...]
"""Tokens behind the committed ones, after which the datastore is asked what follows."""

FIRST_VALUE = 0.5
"""Tokens of an answer of the datastore that the target says, until it is known."""
MAX_PAUSE = 16
"""Rounds without a question, at most, while answers are worth less than they cost. Each such answer doubles the pause:
where all share few cores, an answer that nobody waits for is not free either."""
MIN_AHEAD_PROBABILITY = 0.1
"""What comes behind a continuation is asked for if it is used up with at least this probability."""


class SessionRetrieval:
    """Of one generation. Owned by the engine's thread."""

    def __init__(self, session: Session, plan: RetrievalPlan, pace: EngineTimings, tiers: TierSource | None) -> None:
        """`tiers` are copies of the datastore's; None = there is no datastore. If there is one, it has been asked what
        follows the prompt."""
        spec = session.spec
        self._tree, self._plan, self._pace = session.tree, plan, pace
        self._retriever = Retriever(
            session.committed, len(spec.prompt_token_ids), spec.sampling, pace.retrieval, tiers, plan
        )
        self._has_datastore = tiers is not None
        self._enough_ahead = 2 * spec.speculation.num_speculative_tokens
        self.spent_s = 0.0
        """Time that this round's lookups in process have taken, learning from the commit before it included."""
        self._barren: Node | None = None
        """The end of a chain behind which nothing is known in process."""
        self._match_len = 0
        self._question: Question | None = None
        self._open: dict[int, Node | None] = {len(session.committed): None} if self._has_datastore else {}
        """Questions that are not answered, the oldest first, by position: the node behind which the answer stands, None
        = it is behind committed tokens."""
        self._asked_tip: Node | None = None
        """The last node behind which the datastore was asked ahead."""
        self._awaits = self._has_datastore
        self._num_timeouts = self._pause = self._num_skipped = 0
        self._last_answer: tuple[int, list[TokenId]] | None = None
        """Behind committed tokens: its position, and its most probable tokens."""
        self._value = RunningMean(0.2)
        """Tokens of such an answer that the target says."""

    # In process.

    def extend(self, chain: Sequence[Node], missing: int) -> bool:
        """Adds at most `missing` tokens in a row that are known behind a chain; whether there are any."""
        tip = chain[-1] if chain else self._tree.root
        if not self._plan.is_in_process or missing <= 0 or tip.children or tip is self._barren:
            return False
        started = time.perf_counter()
        behind = [node.token_id for node in chain]
        self._match_len = self._retriever.grow(self._tree, tip, behind, missing)
        self._barren = None if tip.children else tip
        self.spent_s += time.perf_counter() - started
        return bool(tip.children)

    def learn(self, judged: Sequence[Node], verdict: Verdict) -> None:
        """The target has spoken. `judged` are the nodes that it kept, and the one that it refused, if any."""
        started = time.perf_counter()
        if not judged and verdict.token_ids:
            self._retriever.observe(verdict.base_len, verdict.token_ids[0])
        self._retriever.judge(judged, verdict.num_accepted)
        self._retriever.commit(verdict.token_ids, verdict.rejected_token_id)
        self.spent_s += time.perf_counter() - started

    def begin_round(self) -> None:
        """A verdict is in: nothing is known of the new round."""
        self.spent_s, self._barren, self._match_len = 0.0, None, 0
        self._question, self._awaits = None, False

    # From the datastore.

    def ask(self, *, was_known: bool) -> None:
        """Decides what the datastore is asked in this round, when the tree has all that is known in process.

        Args:
            was_known: Whether the tree had something behind the committed tokens before that.
        """
        if not self._has_datastore:
            return
        if self._plan.looks_ahead and self._tree.root.children:
            self._ask_ahead()
        elif not was_known and self._match_len < MIN_MATCH_LEN:
            self._value_last_answer()
            if self._is_worth_asking():
                self._awaits = True
                self._put((), None)

    def _is_worth_asking(self) -> bool:
        if self._num_skipped < self._pause:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        return True

    def _ask_ahead(self) -> None:
        """Asks for what comes behind the most probable path, if that is short; once for each end."""
        path = self._tree.best_chain(self._enough_ahead)
        tip = path[-1]
        if len(path) == self._enough_ahead or tip is self._asked_tip:
            return
        if sum(node.logprob for node in path) >= math.log(MIN_AHEAD_PROBABILITY):
            self._asked_tip = tip
            self._put(tuple(node.token_id for node in path), tip)

    def _put(self, question: Question, tip: Node | None) -> None:
        self._question = question
        base_len = len(self._tree.committed) + len(question)
        self._open.pop(base_len, None)
        self._open[base_len] = tip

    def take_question(self) -> Question | None:
        """What to ask the datastore now; None = nothing."""
        question, self._question = self._question, None
        return question

    def add(self, base_len: int, continuation: Continuation) -> bool:
        """What the datastore has found, possibly nothing. Returns whether this is the answer that was awaited."""
        self._num_timeouts = 0
        tip = self._answered(base_len)
        is_awaited = self._awaits and tip is None and base_len == len(self._tree.committed)
        is_ahead = tip is not None
        guess = self._retriever.from_datastore(continuation, base_len)
        if not is_ahead:
            tip = self._tree.anchor(base_len)
            self._value_last_answer()
            self._last_answer = base_len, [] if guess is None else guess.path()
        self._awaits = self._awaits and not is_awaited
        if guess is not None and tip is not None:
            self._retriever.plant(self._tree, tip, guess)
            if self._plan.looks_ahead and self._tree.root.children:
                self._ask_ahead()
        return is_awaited

    def _answered(self, base_len: int) -> Node | None:
        """The node behind which an answer stands. Answers come in order: older questions have gone under."""
        if base_len not in self._open:
            return None
        while True:
            oldest = next(iter(self._open))
            tip = self._open.pop(oldest)
            if oldest == base_len:
                return tip

    def _value_last_answer(self) -> None:
        """The target has gone on: how much of the last answer did it say?"""
        if self._last_answer is None:
            return
        (position, path), self._last_answer = self._last_answer, None
        value = 0
        for said, token_id in zip(self._tree.committed[position:], path, strict=False):
            if said != token_id:
                break
            value += 1
        self._value.add(value)
        self._pace.answer_value.add(value)
        known = self._known_pace()
        is_worth = patience_ms(Waiting.WORTH, replace(known, num_timeouts=0)) > 0
        self._pause = 0 if is_worth else min(2 * self._pause + 1, MAX_PAUSE)

    def lose(self) -> None:
        """The datastore does not answer."""
        self._awaits = False
        self._open.clear()

    # Waiting.

    def patience_ms(self) -> float:
        """How long the answer that follows the commit may be waited for; 0 = there is none, or it is not worth it."""
        return patience_ms(Waiting.WORTH, self._known_pace()) if self._awaits else 0.0

    def _known_pace(self) -> DraftTimings:
        pace = self._pace
        value = self._value.get(pace.answer_value.get(FIRST_VALUE))
        return DraftTimings(pace.datastore_ms.value, pace.forward_ms.get(0.0), value, self._num_timeouts)

    def time_out(self) -> None:
        """It was waited for in vain."""
        self._num_timeouts += 1
