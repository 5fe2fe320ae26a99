"""Measured agreement of the target with drafted tokens.

Drafters claim probabilities, and datastores count followers. Neither says how often the target agrees. That is learnt
here from its verdicts: for retrieved tokens, for a draft model's tokens, and for the chains of one session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.growth import Candidate
from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node, NodeState, TokenId

LEAST_RATE = 0.02
"""Least rate of a guess, and least distance of a rate from 1: the first measured rates rest on few cases."""

RetrievalKey = tuple[Source, int, int]
"""Guesses that are counted together: source, length of the match, class of the share."""
MAX_FINE_CLASS = 6
"""Shares below one half to this power are counted as that."""

RETRIEVAL_FIRST_WEIGHT = 4
"""Cases that the rate before the first case is worth."""
MAX_COUNTED_LEN = 8
"""Longer matches are counted as this long."""


class RetrievalCalibration:
    """Learns how often the target agrees with a retrieved token, by source, length of the match and share of the token.

    Shared by the sessions of a process; used by one thread. It begins with rates that were measured on source code.
    """

    def __init__(self, weight: float = 0.03) -> None:
        self._weight = weight
        self._rates: dict[RetrievalKey, float] = {}
        self._num_seen: dict[RetrievalKey, int] = {}

    def key(self, source: Source, match_len: int, share: float, *, is_fine: bool = False) -> RetrievalKey:
        """Returns the key that a guess is counted under.

        Args:
            source: Its source.
            match_len: Tokens of the context that matched.
            share: Share of this token among the followers of the match.
            is_fine: Tells small shares apart, for trees, where most nodes have one.
        """
        if is_fine and share <= 0.5:
            return source, min(match_len, MAX_COUNTED_LEN), -min(MAX_FINE_CLASS, int(-math.log2(share)))
        return source, min(match_len, MAX_COUNTED_LEN), 2 if share > 0.9 else 1 if share > 0.5 else 0

    def rate(self, key: RetrievalKey) -> float:
        """Returns the probability that the target agrees."""
        rate = self._rates.get(key)
        return _first_rate(key) if rate is None else rate

    def add(self, key: RetrievalKey, agreed: bool) -> None:
        """Counts a verdict of the target on a guess."""
        rate = self.rate(key)
        num_seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
        # The first rate counts as RETRIEVAL_FIRST_WEIGHT cases; later, new cases count more.
        rate += max(self._weight, 1 / (num_seen + RETRIEVAL_FIRST_WEIGHT)) * (agreed - rate)
        # Never 0: a retrieved node is scored by the logarithm of its rate.
        self._rates[key] = min(1 - LEAST_RATE, max(LEAST_RATE, rate))


def _first_rate(key: RetrievalKey) -> float:
    _, match_len, share = key
    # Nine rates, for lengths 0 to MAX_COUNTED_LEN: `RetrievalCalibration.key` lets no longer one through.
    by_length = (0.3, 0.3, 0.55, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92)[match_len]
    # Fine classes are negative: one half for each step below the class of all small shares.
    return by_length * ((0.4, 0.75, 1.0)[share] if share >= 0 else 0.8 * 0.5**-share)


DraftKey = tuple[bool, int, int, int]
"""Claims that are counted together: true at temperature 0 (nothing is drawn), rank, class of the depth, class of the
probability."""

MAX_RANK = 4
"""Later ranks are counted as this one."""
DRAFT_FIRST_WEIGHT = 6.0
"""Claims that the first correction, which changes nothing, is worth."""
CLAIM_DECAY = 1 - 1 / 400
"""Factor of the weight of old claims at each new one."""
MOST_LOGPROB = math.log(0.99)
"""Greatest corrected log-probability of a claim."""
LEAST_LOGPROB = -100.0
"""Least weight of a claim, as a logarithm: at a low temperature a probability may be 0 as a floating-point number."""


class DraftCalibration:
    """Corrects the probabilities that one draft model claims for its tokens.

    Shared by the sessions of a process; used by one thread.
    """

    def __init__(self) -> None:
        self._sums: dict[DraftKey, list[float]] = {}

    def key(self, is_greedy: bool, rank: int, depth: int, logprob: float) -> DraftKey:
        """Returns the key that a claim is counted under.

        Args:
            is_greedy: True at temperature 0.
            rank: Rank of the token among the candidates of its node, from 0.
            depth: Depth below the root; 1 is a child of the root.
            logprob: The claimed log-probability.
        """
        depth_class = 0 if depth <= 1 else 1 if depth <= 3 else 2
        # Classes are half a nat wide: they end at probabilities of .61, .37, .22, .14, .08 and .05.
        return is_greedy, min(rank, MAX_RANK), depth_class, min(6, int(-2.0 * logprob))

    def corrected(self, key: DraftKey, logprob: float) -> float:
        """Returns the log-probability that the target says a token with this claimed log-probability."""
        sums = self._sums.get(key)
        if sums is None:
            return min(logprob, MOST_LOGPROB)
        claimed, agreed = sums
        # Observed over expected agreement, shrunk towards 1 by a prior of DRAFT_FIRST_WEIGHT claims. LEAST_LOGPROB
        # keeps the prior above 0, so that neither the quotient nor its logarithm can fail.
        first = DRAFT_FIRST_WEIGHT * math.exp(max(logprob, LEAST_LOGPROB))
        return min(logprob + math.log((agreed + first) / (claimed + first)), MOST_LOGPROB)

    def add(self, claims: Sequence[tuple[DraftKey, float]], agreed: int) -> None:
        """Counts a verdict of the target on the candidates of a node.

        Args:
            claims: The key and the claimed log-probability of each candidate, best first.
            agreed: Index of the candidate that the target said. -1 means another token.
        """
        for index, (key, logprob) in enumerate(claims):
            sums = self._sums.setdefault(key, [0.0, 0.0])
            sums[0] = sums[0] * CLAIM_DECAY + math.exp(logprob)
            sums[1] = sums[1] * CLAIM_DECAY + (index == agreed)


class PendingClaims:
    """Holds the claims of one session that have no verdict yet. Every candidate passes through here between the model
    and the tree."""

    def __init__(self, calibration: DraftCalibration | None, is_greedy: bool) -> None:
        """`calibration` None means that claims are neither corrected nor judged."""
        self._calibration = calibration
        self._is_greedy = is_greedy
        self._open: dict[Node, tuple[list[TokenId], list[tuple[DraftKey, float]]]] = {}

    def corrected(self, tree: DraftTree, node: Node, found: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates of a node with corrected log-probabilities, and keeps the claimed ones."""
        calibration, depth = self._calibration, node.position + 1 - tree.root.position
        if calibration is None:
            return list(found)
        claims, corrected = [], []
        for rank, candidate in enumerate(found):
            key = calibration.key(self._is_greedy, rank, depth, candidate.logprob)
            claims.append((key, candidate.logprob))
            logprob = calibration.corrected(key, candidate.logprob)
            # q stays the distribution that the token was drawn from: only the score is corrected, or the ratio rule
            # would change the text's distribution.
            corrected.append(Candidate(candidate.token_id, logprob, candidate.q))
        self._open[node] = [candidate.token_id for candidate in found], claims
        return corrected

    def judge(self, tree: DraftTree, token_ids: Sequence[TokenId]) -> None:
        """Counts a commit against the claims. Call it before the tree is re-rooted."""
        node: Node | None = tree.root
        for token_id in token_ids:
            if node is None or self._calibration is None:
                break
            # Taken out: there is only one verdict after a node.
            claimed = self._open.pop(node, None)
            if claimed is not None:
                tokens, claims = claimed
                self._calibration.add(claims, tokens.index(token_id) if token_id in tokens else -1)
            node = node.children.get(token_id)

    def forget(self) -> None:
        """Drops claims below dead nodes: they will have no verdict."""
        # The root stays, though it is committed: there is no verdict after it yet.
        self._open = {node: claimed for node, claimed in self._open.items() if node.state is not NodeState.DEAD}


FIRST_ACCEPTANCE_RATE = 0.7
"""Acceptance rate of a session before its first verdict."""
FIRST_ACCEPTANCE_WEIGHT = 8.0
"""Tokens that the first rate is worth."""
ACCEPTANCE_DECAY = 1 - 1 / 64
"""Factor of the weight of old tokens at each new one."""
MIN_ACCEPTANCE_RATE, MAX_ACCEPTANCE_RATE = 0.05, 0.98
"""Beyond these, SAGUARO's Theorem 12 gives everything to one end of the chain, by the evidence of a few rounds."""


class AcceptanceRate:
    """Measures how often a token of a chain is accepted if those before it were (a_p of SAGUARO's Theorem 12).

    Belongs to one session. Old rounds count less.
    """

    def __init__(self) -> None:
        self._num_judged = FIRST_ACCEPTANCE_WEIGHT
        self._num_accepted = FIRST_ACCEPTANCE_RATE * FIRST_ACCEPTANCE_WEIGHT

    @property
    def value(self) -> float:
        """The rate, in [MIN_ACCEPTANCE_RATE, MAX_ACCEPTANCE_RATE]."""
        return min(MAX_ACCEPTANCE_RATE, max(MIN_ACCEPTANCE_RATE, self._num_accepted / self._num_judged))

    def add(self, num_accepted: int, *, is_refused: bool) -> None:
        """Counts a verdict.

        Args:
            num_accepted: Leading tokens of the chain that were accepted.
            is_refused: True if the next one was refused, false if the chain ended.
        """
        for outcome in (*(1.0,) * num_accepted, *(0.0,) * is_refused):
            self._num_judged = ACCEPTANCE_DECAY * self._num_judged + 1.0
            self._num_accepted = ACCEPTANCE_DECAY * self._num_accepted + outcome


FIRST_EXPONENT = 1.0
"""Exponent before the first miss, about as measured with a draft model that shares the target's noise (.95 to .99).
Without shared noise it is less than half of that."""
FIRST_EXPONENT_WEIGHT = 8.0
"""Outcomes that the first exponent is worth."""
MAX_COUNTED_RANK = 8
"""Ranks from this one on count as missed by all guesses: a node's forward finds about as many candidates."""
MIN_EXPONENT, MAX_EXPONENT = 0.02, 4.0
"""Bounds of the measured exponent."""


class MissExponent:
    """Measures how fast misses become fewer with the number of guesses (r of SAGUARO's Theorem 12). The probability
    that the target's token is none of the F best falls like F ** -r, here (F + 1) ** -r.

    Belongs to one session. Old outcomes count less.
    """

    def __init__(self) -> None:
        self._counts = [0.0] * (MAX_COUNTED_RANK + 1)
        self._value: float | None = FIRST_EXPONENT

    @property
    def value(self) -> float:
        """The exponent, in [MIN_EXPONENT, MAX_EXPONENT]."""
        if self._value is None:
            self._value = self._fitted()
        return self._value

    def add(self, rank: int | None) -> None:
        """Counts an outcome: the rank of the target's token among the guesses, from 0; None = it was none of them."""
        self._counts = [ACCEPTANCE_DECAY * count for count in self._counts]
        self._counts[MAX_COUNTED_RANK if rank is None else min(rank, MAX_COUNTED_RANK)] += 1.0
        self._value = None

    def _fitted(self) -> float:
        """Returns minus the slope of log misses over log (F + 1), by least squares, drawn towards FIRST_EXPONENT. The
        line goes through the origin, since with no guess every token is a miss."""
        total = missed = sum(self._counts)
        products = squares = 0.0
        for num_guesses, hits in enumerate(self._counts[:-1], start=1):
            missed -= hits
            x = math.log(num_guesses + 1)
            # Never 0: outcomes are few, and a logarithm is taken.
            products += x * math.log((missed + 0.5) / (total + 0.5))
            squares += x * x
        exponent = (FIRST_EXPONENT_WEIGHT * FIRST_EXPONENT - total * products / squares) / (
            FIRST_EXPONENT_WEIGHT + total
        )
        return float(min(MAX_EXPONENT, max(MIN_EXPONENT, exponent)))
