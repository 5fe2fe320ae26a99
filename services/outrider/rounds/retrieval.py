"""Retrieval for one generation: continuations that are known in process, and questions to the datastore.

The datastore is asked while a forward runs, and only for what is not known in process. `spacelike` knows nothing in
process: it asks after each commit that leaves no continuation, and before a continuation is used up it asks what
follows it. An answer is waited for as long as earlier answers were worth; a datastore that finds nothing is asked less
often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.core.costs import DraftTimings, patience_ms
from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Continuation, Follower
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.pool import agreed_phrases
from outrider.core.retrieval.retriever import MIN_MATCH_LEN, Retriever, TierSource
from outrider.core.session import Session, Verdict
from outrider.core.speculation import Waiting
from outrider.core.statistics import RunningMean
from outrider.core.tree import Node, TokenId
from outrider.rounds.timings import EngineTimings

Question = tuple[TokenId, ...]
"""Tokens after the committed ones. The datastore is asked what follows them."""

FIRST_VALUE = 0.5
"""Assumed number of tokens of a datastore's answer that the target emits, until it is measured."""
MAX_PAUSE = 16
"""Most rounds without a question while answers are worth less than they cost. Each such answer doubles the pause: if
the services share few cores, even an answer that is not waited for takes time from the target."""
MIN_AHEAD_PROBABILITY = 0.1
"""The tokens after a continuation are asked for if the target uses it up with at least this probability."""


class SessionRetrieval:
    """Adds what is retrieved to the tree of one generation, and decides what to ask the datastore. Owned by the
    engine's thread."""

    def __init__(self, session: Session, plan: RetrievalPlan, timings: EngineTimings, tiers: TierSource | None) -> None:
        """
        Args:
            session: The generation, with its prompt committed.
            plan: The tiers to look in, and the numbers of tokens after which to look.
            timings: What all sessions have measured.
            tiers: Copies of the datastore's tiers. None means that there is no datastore. If there is one, it has
                already been asked what follows the prompt.
        """
        spec = session.spec
        self._tree, self._plan, self._timings = session.tree, plan, timings

        # In process.
        self._retriever = Retriever(
            session.committed,
            len(spec.prompt_token_ids),
            spec.sampling,
            timings.retrieval,
            tiers,
            plan,
            spec.prediction_token_ids,
        )
        self.spent_s = 0.0
        """Time of this round's lookups in process, including learning from the commit before it."""
        self._barren: Node | None = None
        """The end of a chain after which nothing is known in process."""
        self._match_len = 0
        self._tail: tuple[Node, list[Node]] | None = None
        """The end of a chain, and what is known in process after it."""
        self._branched: Node | None = None
        """The root after which a tree has been grown."""
        self._unlearnt: list[TokenId] = []
        """Committed tokens since the latest lookup: they are learnt at the next one."""

        # Questions to the datastore.
        self._has_datastore = tiers is not None
        self._question: Question | None = None
        """The question to be sent."""
        self._unanswered: dict[int, Node | None] = {len(session.committed): None} if self._has_datastore else {}
        """Nodes that the answers will follow, by position, the oldest first. None means that an answer follows
        committed tokens."""
        self._enough_ahead = 2 * spec.speculation.num_speculative_tokens
        self._last_tip_ahead: Node | None = None
        """The last node after which the datastore was asked ahead."""
        self._pause = self._num_skipped = 0

        # Answers of the datastore, and their value.
        self._awaits = self._has_datastore
        """True while the answer that follows the latest commit may be waited for."""
        self._num_timeouts = 0
        self._last_answer: tuple[int, list[TokenId]] | None = None
        """The last answer that follows committed tokens: its position, and its most probable tokens."""
        self._value = RunningMean(0.2)
        """Tokens of such an answer that the target emits."""

    # In process.

    def extend(self, chain: Sequence[Node], missing: int) -> bool:
        """Adds at most `missing` tokens in a row that are known to follow a chain. Returns True if there are any."""
        tip = chain[-1] if chain else self._tree.root
        # A chain may end before nodes that are too improbable for it: nothing replaces them.
        if not self._plan.is_in_process or missing <= 0 or tip.children or tip is self._barren:
            return False
        started = time.perf_counter()
        self._catch_up()
        behind = [node.token_id for node in chain]
        self._match_len = self._retriever.grow(self._tree, tip, behind, missing)
        # A round is considered repeatedly while it waits; if nothing is known, one lookup is enough.
        self._barren = None if tip.children else tip
        self.spent_s += time.perf_counter() - started
        return bool(tip.children)

    @property
    def has_branches(self) -> bool:
        """See `RetrievalPlan`."""
        return self._plan.has_branches

    def branch(self, max_depth: int) -> None:
        """Grows a tree of what is known in process after the committed tokens, at most `max_depth` tokens deep; once
        for each commit."""
        root = self._tree.root
        if max_depth <= 0 or root is self._branched:
            return
        started = time.perf_counter()
        self._catch_up()
        self._branched = root
        guess = self._retriever.tree(max_depth)
        if guess is not None:
            self._retriever.plant(self._tree, root, guess)
            self._match_len = guess.match_len
        self.spent_s += time.perf_counter() - started

    @property
    def max_tail_len(self) -> int:
        """See `RetrievalPlan`."""
        return self._plan.max_tail_len

    def tail(self, chain: Sequence[Node], max_len: int) -> list[Node]:
        """Returns at most `max_len` nodes in a row after a chain, adding what is known in process there."""
        if not self._plan.is_in_process or max_len <= 0:
            return []
        tip = chain[-1] if chain else self._tree.root
        # A round is considered repeatedly while it waits; one lookup after each end is enough.
        if self._tail is None or self._tail[0] is not tip:
            started = time.perf_counter()
            self._catch_up()
            guess = self._retriever.guess([node.token_id for node in chain], self._plan.max_tail_len)
            self._tail = tip, [] if guess is None else self._retriever.plant(self._tree, tip, guess)
            self._match_len = 0 if guess is None else guess.match_len
            self.spent_s += time.perf_counter() - started
        return self._tail[1][:max_len]

    @property
    def wants_next_tokens(self) -> bool:
        """True if it learns from what the target finds probable at every row."""
        return Source.RECYCLED in self._plan.sources

    def watch(self, nodes: Sequence[Node], draws: Sequence[TokenId], next_tokens: Sequence[Sequence[Follower]]) -> None:
        """Learns from the rows of a round, before its verdict takes their parents from the nodes.

        Args:
            nodes: The nodes that were verified.
            draws: The target's token for the root and for each of them.
            next_tokens: The most probable tokens for each of these rows, if they are wanted; otherwise empty.
        """
        started = time.perf_counter()
        if Source.POOL in self._plan.sources:
            self._retriever.learn_phrases(agreed_phrases(self._tree.root, nodes, draws))
        if self.wants_next_tokens:
            token_ids = [self._tree.committed[-1], *(node.token_id for node in nodes)]
            # Backwards: if a token has several rows, that of the more probable path counts.
            self._retriever.recycle(reversed(list(zip(token_ids, next_tokens, strict=True))))
        self.spent_s += time.perf_counter() - started

    def learn(self, judged: Sequence[Node], verdict: Verdict, *, looks_up: bool = True) -> None:
        """Learns from a verdict.

        Args:
            judged: The nodes that were kept, and the one that was refused, if any.
            verdict: The verdict.
            looks_up: False while the session's strategy looks nothing up. A verdict without nodes is then learnt later,
                together with others: in plain rounds, each microsecond of a session delays all that share forwards.
        """
        if not (looks_up or judged):
            self._unlearnt.extend(verdict.token_ids)
            return
        started = time.perf_counter()
        self._catch_up()
        if self._plan.judges_siblings:
            self._retriever.judge_siblings(verdict.base_len, verdict.token_ids)
        else:
            if not judged and verdict.token_ids:
                self._retriever.observe(verdict.base_len, verdict.token_ids[0])
            # After `observe`, which needs the guesses that `judge` forgets because the commit has decided them.
            self._retriever.judge(judged, verdict.num_accepted)
        self._retriever.commit(verdict.token_ids, verdict.rejected_token_ids)
        self.spent_s += time.perf_counter() - started

    def _catch_up(self) -> None:
        if self._unlearnt:
            token_ids, self._unlearnt = self._unlearnt, []
            self._retriever.commit(token_ids)

    def begin_round(self) -> None:
        """Resets what belongs to the previous round."""
        self.spent_s, self._barren, self._match_len, self._tail = 0.0, None, 0, None
        self._question, self._awaits = None, False

    # From the datastore.

    def ask(self, *, was_known: bool) -> None:
        """Decides what the datastore is asked in this round. Called when the tree has all that is known in process.

        Args:
            was_known: True if the tree had something after the committed tokens before that.
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
        """Asks what follows the most probable path, if that is short; once for each end."""
        path = self._tree.best_chain(self._enough_ahead)
        tip = path[-1]
        if len(path) == self._enough_ahead or tip is self._last_tip_ahead:
            return
        if sum(node.logprob for node in path) >= math.log(MIN_AHEAD_PROBABILITY):
            self._last_tip_ahead = tip
            self._put(tuple(node.token_id for node in path), tip)

    def _put(self, question: Question, tip: Node | None) -> None:
        self._question = question
        base_len = len(self._tree.committed) + len(question)
        # A key that is set again keeps its old place in a dict, but the order must be that of the questions.
        self._unanswered.pop(base_len, None)
        self._unanswered[base_len] = tip

    def take_question(self) -> Question | None:
        """Returns what to ask the datastore now, once. None means nothing."""
        question, self._question = self._question, None
        return question

    def add(self, base_len: int, continuation: Continuation) -> bool:
        """Takes in what the datastore has found, possibly nothing. Returns True if this answer was awaited."""
        self._num_timeouts = 0
        tip = self._answered(base_len)
        is_awaited = self._awaits and tip is None and base_len == len(self._tree.committed)
        is_ahead = tip is not None
        guess = self._retriever.from_datastore(continuation, base_len)
        if not is_ahead:
            # A late answer follows a committed token; the tree drops what contradicts the tokens committed since.
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
        """Returns the node that an answer follows."""
        if base_len not in self._unanswered:
            return None
        # Answers come in order: older questions were lost with their stream.
        while True:
            oldest = next(iter(self._unanswered))
            tip = self._unanswered.pop(oldest)
            if oldest == base_len:
                return tip

    def _value_last_answer(self) -> None:
        """Measures how much of the last answer the target has emitted since, and sets the pause accordingly."""
        if self._last_answer is None:
            return
        (position, path), self._last_answer = self._last_answer, None
        value = 0
        for committed_id, token_id in zip(self._tree.committed[position:], path, strict=False):
            if committed_id != token_id:
                break
            value += 1
        self._value.add(value)
        self._timings.answer_value.add(value)
        # Time-outs are left out: they tell whether answers come, and this is about their value.
        is_worth = patience_ms(Waiting.WORTH, replace(self._answer_timings(), num_timeouts=0)) > 0
        self._pause = 0 if is_worth or self._plan.is_remote else min(2 * self._pause + 1, MAX_PAUSE)

    def lose(self) -> None:
        """Stops waiting, as the datastore does not answer."""
        self._awaits = False
        self._unanswered.clear()

    # Waiting.

    def patience_ms(self) -> float:
        """Returns how long to wait for the answer that follows the commit, in milliseconds; 0 if none comes or is worth
        it."""
        return patience_ms(Waiting.WORTH, self._answer_timings()) if self._awaits else 0.0

    def _answer_timings(self) -> DraftTimings:
        timings = self._timings
        value = self._value.get(timings.answer_value.get(FIRST_VALUE))
        return DraftTimings(timings.datastore_ms.value, timings.forward_ms.get(0.0), value, self._num_timeouts)

    def time_out(self) -> None:
        """Counts a wasted wait for an answer, if one was asked for."""
        # Not counted if the wait was for a lost draft.
        self._num_timeouts += self._awaits
