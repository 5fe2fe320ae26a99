"""How often the target agrees with a retrieved token: a count says how often it followed, which is something else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.drafting.policy import Candidate
from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node, NodeState, TokenId

LEAST = 0.02
"""No guess counts as less, nor as 1 minus less: measured rates are of few cases at first."""

RetrievalKey = tuple[Source, int, int]
"""What guesses are counted under: tier, length of the match, class of the share."""

RETRIEVAL_FIRST_WEIGHT = 4
"""Cases that the rate before the first case is worth."""
MAX_COUNTED_LEN = 8
"""Longer matches are counted as this long."""


class RetrievalCalibration:
    """How often the target agrees with a retrieved token: by tier, length of the match and share of the token.

    Shared by the sessions of a process; used by one thread. Begins with what was measured on source code.
    """

    def __init__(self, weight: float = 0.03) -> None:
        self._weight = weight
        self._rates: dict[RetrievalKey, float] = {}
        self._num_seen: dict[RetrievalKey, int] = {}

    def key(self, source: Source, match_len: int, share: float) -> RetrievalKey:
        """What a guess is counted under."""
        return source, min(match_len, MAX_COUNTED_LEN), 2 if share > 0.9 else 1 if share > 0.5 else 0

    def rate(self, key: RetrievalKey) -> float:
        """Probability that the target agrees."""
        rate = self._rates.get(key)
        return _first_rate(key) if rate is None else rate

    def add(self, key: RetrievalKey, agreed: bool) -> None:
        """The target has spoken."""
        rate = self.rate(key)
        num_seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
        # What was measured elsewhere counts as RETRIEVAL_FIRST_WEIGHT cases; later, what happens now counts more.
        rate += max(self._weight, 1 / (num_seen + RETRIEVAL_FIRST_WEIGHT)) * (agreed - rate)
        self._rates[key] = min(1 - LEAST, max(LEAST, rate))


def _first_rate(key: RetrievalKey) -> float:
    _, match_len, share = key
    by_length = (0.3, 0.3, 0.55, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92)[match_len]
    return by_length * (0.4, 0.75, 1.0)[share]


DraftKey = tuple[bool, int, int, int]
"""What claims are counted under: whether nothing is drawn (temperature 0), rank, class of the depth, class of the
probability."""

MAX_RANK = 4
DRAFT_FIRST_WEIGHT = 6.0
"""Claims that the first correction, none, is worth."""
FADE = 1 - 1 / 400
"""What is left of the weight of old claims after each new one."""
MOST = 0.99
"""No claim counts as more."""
LEAST_LOGPROB = -100.0
"""No claim weighs less: at a low temperature a claim may be so improbable that its probability is 0 as a number."""


class DraftCalibration:
    """Corrects claims. Shared by the sessions of a process, and by few enough of them to be of one draft model; used by
    one thread."""

    def __init__(self) -> None:
        self._sums: dict[DraftKey, list[float]] = {}

    def key(self, is_greedy: bool, rank: int, depth: int, logprob: float) -> DraftKey:
        """What a claim is counted under. `depth` 1 is a child of the root."""
        depth_class = 0 if depth <= 1 else 1 if depth <= 3 else 2
        return is_greedy, min(rank, MAX_RANK), depth_class, min(6, int(-2.0 * logprob))

    def corrected(self, key: DraftKey, logprob: float) -> float:
        """Log-probability that the target says it, of a claim of this log-probability."""
        sums = self._sums.get(key)
        if sums is None:
            return min(logprob, math.log(MOST))
        claimed, agreed = sums
        first = DRAFT_FIRST_WEIGHT * math.exp(max(logprob, LEAST_LOGPROB))
        return min(logprob + math.log((agreed + first) / (claimed + first)), math.log(MOST))

    def add(self, claims: Sequence[tuple[DraftKey, float]], agreed: int) -> None:
        """The target has spoken where these candidates (key, claimed log-probability) stood, best first: it said number
        `agreed`, or something else (-1)."""
        for index, (key, logprob) in enumerate(claims):
            sums = self._sums.setdefault(key, [0.0, 0.0])
            sums[0] = sums[0] * FADE + math.exp(logprob)
            sums[1] = sums[1] * FADE + (index == agreed)


class PendingClaims:
    """Candidates go through here on their way from the model into the tree."""

    def __init__(self, calibration: DraftCalibration, is_greedy: bool) -> None:
        self._calibration = calibration
        self._is_greedy = is_greedy
        self._open: dict[Node, tuple[list[TokenId], list[tuple[DraftKey, float]]]] = {}

    def corrected(self, tree: DraftTree, node: Node, found: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of a node with corrected log-probabilities; remembers what was claimed."""
        calibration, depth = self._calibration, node.position + 1 - tree.root.position
        claims, corrected = [], []
        for rank, candidate in enumerate(found):
            key = calibration.key(self._is_greedy, rank, depth, candidate.logprob)
            claims.append((key, candidate.logprob))
            logprob = calibration.corrected(key, candidate.logprob)
            corrected.append(Candidate(candidate.token_id, logprob, candidate.q))
        self._open[node] = [candidate.token_id for candidate in found], claims
        return corrected

    def judge(self, tree: DraftTree, token_ids: Sequence[TokenId]) -> None:
        """The target says these tokens next; the tree has not been told yet."""
        node: Node | None = tree.root
        for token_id in token_ids:
            if node is None:
                break
            claimed = self._open.pop(node, None)
            if claimed is not None:
                tokens, claims = claimed
                self._calibration.add(claims, tokens.index(token_id) if token_id in tokens else -1)
            node = node.children.get(token_id)

    def forget(self) -> None:
        """Drops what was claimed where the target will never speak."""
        self._open = {node: claimed for node, claimed in self._open.items() if node.state is not NodeState.DEAD}
