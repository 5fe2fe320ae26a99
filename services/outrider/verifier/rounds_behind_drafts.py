"""Rounds that a device is asked for while it is still at their drafts, where target and draft model take turns on it.

The target's rows are laid out for a chain of as many tokens as the draft model makes steps, and for some of its next
best tokens beside each. Which tokens these are, the device knows when it comes to them, and the host when it makes the
verdict. So neither what the host makes of a draft nor the packing of the target's rows keeps the device waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.core.costs import Contexts
from outrider.core.statistics import RunningMean
from outrider.core.tree import TokenId
from outrider.models.packing import Segment
from outrider.models.pending_draft import NUM_BEST, PendingDraft
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings

LEARNING_RATE = 0.05
"""Weight of one round in what is known of the tokens beside a chain."""
FIRST_SHARE = 0.1
"""Share of the rounds in which a token beside the chain is right, until that was measured."""


class Followed(NamedTuple):
    """Describes the rows of a session behind a draft: its last token, a chain, and tokens beside that."""

    chain: int
    """Number of its chain in the draft."""
    depth: int
    """Length of the chain."""
    width: int
    """Tokens beside each of its nodes."""

    def places(self, draft: PendingDraft) -> list[int]:
        """Returns where the tokens of the rows are among those of the draft."""
        steps = range(1, self.depth + 1)
        beside = [draft.place(self.chain, step, rank) for step in steps for rank in range(1, self.width + 1)]
        return [draft.place(self.chain, step) for step in range(self.depth + 1)] + beside


class RoundsBehindDrafts:
    """Chooses the rows of rounds behind drafts. Owned by the engine's thread."""

    def __init__(self, timings: EngineTimings) -> None:
        """
        Args:
            timings: What all sessions have measured.
        """
        self._timings = timings
        self._shares = [RunningMean(LEARNING_RATE) for _ in range(NUM_BEST - 1)]
        """Share of the rounds in which a token of each rank beside the chain is right where the chain is not."""

    def plan(
        self, draft: PendingDraft, sessions: Sequence[VerifySession], max_num_nodes: int
    ) -> dict[VerifySession, Followed]:
        """Chooses the rows of all sessions behind a draft. Empty where they should not be verified behind it.

        Args:
            draft: The draft.
            sessions: All that share forwards; at least one.
            max_num_nodes: Most nodes of each.
        """
        numbers = {start.session_id: number for number, start in enumerate(draft.starts)}
        chains = {session: numbers.get(session.session.spec.session_id) for session in sessions}
        depths: dict[VerifySession, int] = {}
        for session, number in chains.items():
            if number is None or not session.can_follow(draft.starts[number].base_len):
                return {}
            most = session.session.spec.speculation.max_rows or max_num_nodes
            depths[session] = min(draft.num_steps, session.session.max_chain_len, max_num_nodes, most)
        if len(numbers) > len(sessions) or not any(depths.values()):
            return {}
        width = self._width(depths, max_num_nodes)
        return {session: Followed(chains[session] or 0, depth, width) for session, depth in depths.items()}

    def _width(self, depths: dict[VerifySession, int], max_num_nodes: int) -> int:
        """Returns how many tokens beside each node of the chains bring most in their time."""
        timings = self._timings
        contexts = Contexts(sum(session.cache.length for session in depths), len(depths))
        tokens = sum(1 + session.accepted_per_chain for session in depths)
        rates = []
        for width in range(NUM_BEST):
            num_nodes = [depth * (1 + width) for depth in depths.values()]
            limits = (session.session.spec.speculation.max_rows or max_num_nodes for session in depths)
            if width and any(count > limit for count, limit in zip(num_nodes, limits, strict=True)):
                break
            if width:
                tokens += len(depths) * self._shares[width - 1].get(FIRST_SHARE)
            forward_ms = timings.forward_times.of(len(depths) + sum(num_nodes), contexts)
            rates.append(tokens / (timings.speculator_ms.get(forward_ms) + forward_ms))
        return rates.index(max(rates))

    def learn(self, found: Sequence[Sequence[TokenId]], draws: Sequence[TokenId]) -> None:
        """Learns from a round what tokens beside the chain are worth.

        Args:
            found: The best tokens of each step of its chain.
            draws: The target's token behind each node of the chain, and before the first one.
        """
        steps = enumerate(zip(found, draws, strict=False))
        refused = next((step for step, (best, drawn) in steps if best[0] != drawn), None)
        for rank, share in enumerate(self._shares, start=1):
            share.add(float(refused is not None and draws[refused] in found[refused][rank : rank + 1]))


def rows_behind(session: VerifySession, followed: Followed, draft: PendingDraft) -> Segment:
    """Lays out the rows of a session behind a draft; their token ids are places among the draft's tokens."""
    session.follow(followed.depth, followed.width)
    return session.segment(0, len(session.nodes))._replace(token_ids=followed.places(draft))
