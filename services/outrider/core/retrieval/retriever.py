"""One session's retrieval in process: guesses from its sources, with the probability that the target agrees.

It sends no messages. The prior and the shared tier are copies that others keep up to date (`TierSource`). The dynamic
tier learns from the session's own commits, and the rejected tier from the drafts that they refute, like their originals
in the datastore. The adjacency matrix and the pool of n-grams are in no datastore.

Unless a session names other sources, it has only tiers, and the longest match counts. If it names the matrix or the
pool, or if its rows may branch, every source guesses, and the guesses become one tree.

A count says how often a token followed, not how often the target will agree. `RetrievalCalibration` measures that, over
all sessions of a process. Above temperature 0 the noise of the target's draw is known, though its logits are not:
tokens that followed the same n-gram are ranked by log share + noise (Daliri, Musco, Suresh 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.calibration import RetrievalCalibration, RetrievalKey
from outrider.core.noise import gumbel_of
from outrider.core.params import SamplingParams, Source
from outrider.core.retrieval.guess import Branches, Guess, grown, merged
from outrider.core.retrieval.ngrams import Continuation, Follower, NgramTier, num_chained
from outrider.core.retrieval.plan import CONTEXT_LEN, RetrievalPlan
from outrider.core.retrieval.pool import NgramPool
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.recycling import AdjacencyMatrix
from outrider.core.retrieval.tiers import LocalTiers
from outrider.core.tree import DraftTree, Node, NodeState, TokenId

MIN_MATCH_LEN = 2
"""Least match that suffices: a match of one token is a weak guess, and the datastore is asked as well."""
SHARPNESS = 1.7
"""Weight of log share + noise, as for a draft model's scores: shares are themselves uncertain."""


class TierSource(Protocol):
    """Holds copies of the datastore's wider tiers. Both may be replaced at any time."""

    @property
    def prior(self) -> PriorTable | None:
        """The prior. None means that there is no prior, or that it has not come yet."""

    @property
    def shared(self) -> NgramTier | None:
        """The shared tier of the session's scope. None means that the scope does not share."""


@dataclass(frozen=True, slots=True)
class _NoCopies:
    prior: PriorTable | None = None
    shared: NgramTier | None = None


NO_COPIES: TierSource = _NoCopies()
"""No copies: for sessions that ask only the datastore."""


EVERYTHING = RetrievalPlan()


class Retriever:
    """Guesses the next tokens of one session, and learns from its commits. One thread owns it."""

    def __init__(
        self,
        committed: Sequence[TokenId],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        calibration: RetrievalCalibration,
        source: TierSource | None = None,
        plan: RetrievalPlan = EVERYTHING,
        prediction: Sequence[TokenId] = (),
    ) -> None:
        """
        Args:
            committed: Prompt and output so far.
            num_prompt_tokens: Length of the prompt.
            sampling: How the target draws.
            calibration: Measured rates of such guesses.
            source: Copies of the datastore's tiers. None means that there are none.
            plan: What is looked up.
            prediction: A text that the output will probably repeat parts of. It is looked up in addition to the other
                sources, and preferred to them.
        """
        self._plan = plan
        self._is_ranked_by_noise = plan.is_ranked_by_noise and not sampling.is_greedy
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._calibration = calibration
        self._source = source
        self._searched = () if plan.is_remote else plan.tiers
        order = (Source.PREDICTION, *self._searched) if prediction else self._searched
        self._tiers, self._has_prediction = LocalTiers(plan.max_match_len, order=order), bool(prediction)
        # As if it followed the prompt: the output's first tokens are found in it, too.
        prompt_end = committed[max(0, num_prompt_tokens - plan.max_match_len) : num_prompt_tokens]
        self._tiers.prediction.learn((*prompt_end, *prediction), len(prompt_end))
        self._matrix, self._pool = AdjacencyMatrix(), NgramPool()
        self._tail: list[TokenId] = []
        self._length = 0
        self._pending: dict[Node, RetrievalKey] = {}
        self._siblings: dict[Node, dict[TokenId, RetrievalKey]] = {}
        """Guesses by the node that they follow, for `judge_siblings`."""
        self.commit(committed)

    def commit(self, token_ids: Sequence[TokenId], rejected: Sequence[TokenId] = (), rejected_at: int = -1) -> None:
        """Learns the committed tokens, and the drafted ones that were refused in their place.

        Args:
            token_ids: The committed tokens.
            rejected: Consecutive drafted tokens; the target refused the first one. Empty if it refused none.
            rejected_at: Index in token_ids of the token that it said instead of that one.
        """
        known = [*self._tail, *token_ids]
        if rejected and token_ids and Source.REJECTED in self._searched:
            # token_ids are the end of `known`. At place 0 there is no context to remember the refused tokens by.
            place = len(known) - (len(token_ids) - rejected_at if rejected_at >= 0 else -rejected_at)
            if place > 0:
                self._tiers.reject(known[max(0, place - self._plan.max_match_len) : place], rejected)
        if Source.DYNAMIC in self._searched:
            self._tiers.record(token_ids)
        if Source.POOL in self._plan.sources:
            self._pool.record(token_ids)
        self._tail = known[-CONTEXT_LEN:]
        self._length += len(token_ids)

    def guess(self, behind: Sequence[TokenId], max_len: int) -> Guess | None:
        """Guesses the tokens that follow the committed ones and the tokens `behind` them: at most max_len in a row.

        Returns:
            None if nothing is known.
        """
        context = [*self._tail, *behind]
        if self._plan.has_own_sources:
            return self._grown(context, self._length + len(behind), max_len, is_wide=False)
        found = self._look_up(context, max_len)
        return None if found.tier is None else self._from_tiers(context, found, self._length + len(behind), max_len)

    def tree(self, max_depth: int) -> Guess | None:
        """Guesses the tokens that follow the committed ones as a tree of all sources' guesses, at most max_depth tokens
        deep.

        Returns:
            None if nothing is known.
        """
        return self._grown(self._tail, self._length, max_depth, is_wide=True)

    def _grown(self, context: Sequence[TokenId], position: int, max_depth: int, *, is_wide: bool) -> Guess | None:
        self._take_copies()
        guesses = [
            grown(branches, context, position, self._ranked, self._calibration, max_depth=max_depth, is_wide=is_wide)
            for branches in self._branches()
        ]
        return merged(guesses, self._calibration)

    def _branches(self) -> list[Branches]:
        """Returns the sources of trees, the preferred first. All tiers are one source: their longest match counts."""
        own: dict[Source, Branches] = {Source.RECYCLED: self._matrix, Source.POOL: self._pool}
        sources = (Source.PREDICTION, *self._plan.sources) if self._has_prediction else self._plan.sources
        return list(dict.fromkeys(own.get(source, self._tiers) for source in sources))

    def recycle(self, rows: Iterable[tuple[TokenId, Sequence[Follower]]]) -> None:
        """Learns the tokens that the target found probable after some tokens; see `AdjacencyMatrix.learn`."""
        self._matrix.learn(rows)

    def learn_phrases(self, phrases: Iterable[Sequence[TokenId]]) -> None:
        """Learns consecutive drafted tokens that were not accepted, but that the target agreed with."""
        for phrase in phrases:
            self._pool.learn(phrase)

    def _look_up(self, context: Sequence[TokenId], max_len: int) -> Continuation:
        self._take_copies()
        return self._tiers.lookup(context, self._plan.max_match_len, max_len)

    def _take_copies(self) -> None:
        # Read anew for each look-up, because others may have replaced the copies meanwhile.
        if self._source is not None:
            self._tiers.prior = self._source.prior if Source.PRIOR in self._searched else None
            self._tiers.shared = self._source.shared if Source.SHARED in self._searched else None

    def grow(self, tree: DraftTree, tip: Node, behind: Sequence[TokenId], max_len: int) -> int:
        """Adds a guess below `tip`, the node of the last token `behind`. Returns its match length, 0 without a
        guess."""
        guess = self.guess(behind, max_len)
        if guess is None:
            return 0
        self.plant(tree, tip, guess)
        return guess.match_len

    def plant(self, tree: DraftTree, tip: Node, guess: Guess) -> list[Node]:
        """Adds the tokens of a guess below a node. Returns the nodes of its most probable path, as far as the tree has
        room for them."""
        nodes: list[Node | None] = []
        logprobs = guess.logprobs(self._calibration)
        for parent, token_id, key, logprob in zip(guess.parents, guess.token_ids, guess.keys, logprobs, strict=True):
            above = tip if parent < 0 else nodes[parent]
            node = None if above is None else tree.add(above, token_id, logprob, key[0])
            nodes.append(node)
            if self._plan.judges_siblings:
                # A committed node has no parent, and needs no verdict any more.
                if node is not None and node.parent is not None:
                    self._siblings.setdefault(node.parent, {})[token_id] = key
                continue
            # If a draft model's node is there already, the verdict will be on that node, not on this guess.
            if node is not None and node.source is key[0]:
                self._pending[node] = key
        path = (nodes[index] for index in guess.path_indices())
        # A full tree has taken only the first ones.
        return [node for node in path if node is not None]

    def from_datastore(self, continuation: Continuation, base_len: int) -> Guess | None:
        """Returns a datastore's answer for position base_len as a guess, or None if it found nothing."""
        if continuation.tier is None or not continuation.token_ids:
            return None
        return self._guess(continuation, base_len)

    def judge(self, chain: Sequence[Node], num_accepted: int) -> None:
        """Learns from a verdict on a chain: the tokens that the target accepted, and the one that it refused."""
        # The target has judged no token after the refused one.
        for index, node in enumerate(chain[: num_accepted + 1]):
            key = self._pending.get(node)
            # A draft model's claim may have replaced the guess since.
            if key is not None and node.source is key[0]:
                self._calibration.add(key, index < num_accepted)
        self._pending = {node: key for node, key in self._pending.items() if node.state is NodeState.LIVE}

    def judge_siblings(self, base_len: int, token_ids: Sequence[TokenId]) -> None:
        """Learns from committed tokens: among the guesses after a node, the one that the target said was right, and all
        others were wrong, whether they were verified or not.

        Args:
            base_len: Number of tokens that were committed before these.
            token_ids: The committed tokens; the tree has taken them in.
        """
        for parent in list(self._siblings):
            place = parent.position + 1 - base_len
            if parent.state is NodeState.COMMITTED and 0 <= place < len(token_ids):
                for token_id, key in self._siblings[parent].items():
                    self._calibration.add(key, token_id == token_ids[place])
                del self._siblings[parent]
            elif parent.state is not NodeState.LIVE:
                del self._siblings[parent]

    def observe(self, position: int, token_id: TokenId) -> None:
        """Learns from a token that the target said without a verdict on the guess in its place.

        The best guess was right or wrong even without a verdict. Without this, a kind of guess that is no longer
        verified could never be seen to improve.
        """
        guesses = [node for node, key in self._pending.items() if node.position == position and node.source is key[0]]
        if guesses:
            best = max(guesses, key=lambda node: node.logprob)
            self._calibration.add(self._pending[best], best.token_id == token_id)

    def phrase(self, tip: Node, max_len: int, min_probability: float) -> tuple[list[TokenId], list[RetrievalKey]]:
        """Returns the most probable path of a guess after a node, and the calibration key of each token.

        Args:
            tip: The node.
            max_len: Most tokens.
            min_probability: The path ends where its probability falls below this.
        """
        context, position = self._context_of(tip), tip.position + 1
        probability, token_ids, keys = 1.0, list[TokenId](), list[RetrievalKey]()
        key_of, rate_of = self._calibration.key, self._calibration.rate
        # A branch that the noise prefers to the most counted path ends that path: the tokens after it are looked up
        # anew.
        while len(token_ids) < max_len:
            found = self._look_up(context, max_len - len(token_ids))
            if found.tier is None:
                break
            path = self._best_path(found, position + len(token_ids))
            for place, (token_id, share) in enumerate(path):
                # A token counts only if those before it are right; then the match is longer by as many tokens.
                key = key_of(found.tier, found.match_len + place, share)
                probability *= rate_of(key)
                if probability < min_probability:
                    return token_ids, keys
                token_ids.append(token_id)
                keys.append(key)
            if len(path) == num_chained(found):
                break
            context = [*context, *(token_id for token_id, _ in path)]
        return token_ids, keys

    def _context_of(self, tip: Node) -> list[TokenId]:
        """Returns the last tokens up to a node."""
        context: list[TokenId] = []
        node: Node | None = tip
        longest = self._plan.max_match_len
        while node is not None and node.state is NodeState.LIVE and len(context) < longest:
            context.append(node.token_id)
            node = node.parent
        context.reverse()
        missing = longest - len(context)
        # Tested, because [-0:] would be the whole tail.
        return [*self._tail[-missing:], *context] if missing else context

    def judge_phrase(self, keys: Sequence[RetrievalKey], num_accepted: int) -> None:
        """Learns from the verdict of a draft model on a phrase."""
        for index, key in enumerate(keys[: num_accepted + 1]):
            self._calibration.add(key, index < num_accepted)

    def _best_path(self, found: Continuation, position: int) -> list[tuple[TokenId, float]]:
        """Returns the most probable consecutive tokens and their shares: the most counted path, or its beginning and
        the branch that the noise prefers there."""
        length, token_ids = num_chained(found), found.token_ids
        path = [(token_id, 1.0) for token_id in token_ids[:length]]
        # A path of one token has no second place: that group then has one item, and is skipped.
        groups: list[list[int]] = [[0], [1]]
        for index in range(length, len(token_ids)):
            # An alternative at the first place follows the context; an alternative at the second place follows the
            # first node.
            groups[found.parent_offsets[index] > 0].append(index)
        for place, children in enumerate(groups):
            if len(children) > 1:
                best, share = self._ranked_children(found, children, position + place)[0]
                path[place] = (token_ids[best], share)
                if best != place:
                    return path[: place + 1]
        return path

    def _from_tiers(self, context: list[TokenId], found: Continuation, position: int, max_len: int) -> Guess:
        guess = self._guess(found, position)
        first = guess.token_ids[0]
        if first != found.token_ids[0] and max_len > 1:
            # The noise prefers another token than the most counted one: the tokens after it are looked up as well.
            behind = self._tiers.lookup([*context, first], self._plan.max_match_len, max_len - 1)
            if behind.tier is not None:
                parent = 0
                for depth, token_id in enumerate(behind.chain()):
                    key = self._calibration.key(behind.tier, behind.match_len + depth, 1.0)
                    parent = guess.add(parent, token_id, key)
        return guess

    def _guess(self, found: Continuation, position: int) -> Guess:
        """Returns a continuation as a guess. Above temperature 0 the token that the noise prefers stands first."""
        assert found.tier is not None
        groups: dict[int, list[int]] = {}
        for index, offset in enumerate(found.parent_offsets):
            groups.setdefault(index - offset if offset else -1, []).append(index)
        guess = Guess(found.match_len, [], [], [])
        places: dict[int, int] = {-1: -1}
        depths: dict[int, int] = {-1: 0}
        waiting = [-1]
        while waiting:
            parent = waiting.pop(0)
            children = groups.get(parent)
            if not children:
                continue
            depth = depths[parent]
            for child, share in self._ranked_children(found, children, position + depth):
                key = self._calibration.key(found.tier, found.match_len + depth, share)
                places[child] = guess.add(places[parent], found.token_ids[child], key)
                depths[child] = depth + 1
                waiting.append(child)
        return guess

    def _ranked_children(self, found: Continuation, children: list[int], position: int) -> list[tuple[int, float]]:
        """Returns siblings and their shares, the best first."""
        followers = [(found.token_ids[child], found.counts[child]) for child in children]
        return [(children[index], share) for index, share in self._ranked(followers, position)]

    def _ranked(self, followers: Sequence[Follower], position: int) -> list[tuple[int, float]]:
        """Returns the indices of followers and their shares, the best first."""
        if len(followers) == 1:
            return [(0, 1.0)]
        total = sum(count for _, count in followers) or 1
        shares = [(index, max(1, count) / total) for index, (_, count) in enumerate(followers)]
        if not self._is_ranked_by_noise:
            return shares
        output_index = position - self._num_prompt_tokens  # noise is keyed by the output index
        noise = gumbel_of(self._sampling.seed, output_index, [token_id for token_id, _ in followers])
        scores = [SHARPNESS * (math.log(share) + g) for (_, share), g in zip(shares, noise, strict=True)]
        best = max(scores)
        # Relative to the best one, so that no exponential overflows.
        weights = [math.exp(score - best) for score in scores]
        scale = sum(weights)
        ranked = [(index, weight / scale) for (index, _), weight in zip(shares, weights, strict=True)]
        ranked.sort(key=lambda pair: -pair[1])
        return ranked
