"""What a session's draft model has claimed, kept until the target has spoken there."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.draft_calibration import DraftCalibration, Key
from outrider.core.growth.policy import Candidate
from outrider.core.tree import DraftTree, Node, NodeState, TokenId


class Claims:
    """Candidates go through here on their way from the model into the tree."""

    def __init__(self, calibration: DraftCalibration, is_greedy: bool) -> None:
        self._calibration = calibration
        self._is_greedy = is_greedy
        self._open: dict[Node, tuple[list[TokenId], list[tuple[Key, float]]]] = {}

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
