"""Rounds that a device is asked for while it is still at their drafts, where target and draft model take turns on it.

The target's rows are laid out for a chain of as many tokens as the draft model makes steps, and for some of its next
best tokens beside each. Which tokens these are, the device knows when it comes to them, and the host when it makes the
verdict. So neither what the host makes of a draft nor the packing of the target's rows keeps the device waiting. The
draft model is told what was kept before the verdicts are made where that can be known, and goes on while the host makes
the rest; elsewhere as soon as they are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.core.costs import Contexts
from outrider.core.params import Rows, Source
from outrider.core.retrieval.ngrams import Follower
from outrider.core.statistics import RunningMean
from outrider.core.tree import DraftTree, Node, NodeState, TokenId
from outrider.models.packing import Segment
from outrider.models.pending_draft import NUM_BEST, PendingDraft, TokensOnDevice
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings

LEARNING_RATE = 0.05
"""Weight of one round in what is known of the tokens beside a chain."""
FIRST_SHARE = 0.1
"""Share of the rounds in which a token beside the chain is right, until that was measured."""
NOT_KNOWN = -1
"""Token of nodes that the device knows and the host does not."""
UNTOLD_LOGPROB = -3.0
"""Log-probability of a token that the target verifies though the drafter does not tell of it: it may be right."""


class RowsBehind(NamedTuple):
    """Describes the rows of a session behind a draft: its last token, a chain, then the tokens beside each of the
    chain's, and what else is to be verified."""

    chain: int
    """Number of its chain in the draft."""
    depth: int
    """Length of the chain."""
    width: int
    """Tokens beside each of the chain's."""
    known: Sequence[Node]
    """Nodes of the tree that are verified together with them."""

    @property
    def num_nodes(self) -> int:
        """Rows without that of the last token."""
        return self.depth * (1 + self.width) + len(self.known)

    def beside(self, step: int) -> range:
        """Returns the rows of the tokens beside the one that a step has found, the steps counted from 0."""
        first = 1 + self.depth + step * self.width
        return range(first, first + self.width)

    def nodes(self, root: Node) -> list[Node]:
        """Makes the nodes of the rows. Those that stand for tokens until they are known are none of the tree's."""
        chain: list[Node] = []
        beside: list[Node] = []
        parent = root
        for _ in range(self.depth):
            position = parent.position + 1
            nodes = [
                Node(NOT_KNOWN, position, parent, 0.0, Source.DRAFT, NodeState.LIVE) for _ in range(1 + self.width)
            ]
            parent = nodes[0]
            chain.append(parent)
            beside += nodes[1:]
        return [*chain, *beside, *self.known]

    def places(self, draft: PendingDraft, first_known: int) -> list[int]:
        """Returns where the tokens of the rows are among those of the draft, which known ones follow: this session's
        from `first_known` on."""
        steps = range(1, self.depth + 1)
        beside = [draft.place(self.chain, step, rank) for step in steps for rank in range(1, self.width + 1)]
        known = range(first_known, first_known + len(self.known))
        return [*(draft.place(self.chain, step) for step in range(self.depth + 1)), *beside, *known]

    def settled(self, session: VerifySession, found: Sequence[Sequence[TokenId]]) -> tuple[list[Node], list[int]]:
        """Finds out what the rows are, when the tokens are known.

        Args:
            session: The session. Its tree has all nodes afterwards, also those that the drafter has not told of: they
                were verified.
            found: The best tokens of each step of the chain, the one that it goes on with first.

        Returns:
            Nodes of its tree, and the rows of the last committed token and of each of these.
        """
        tree = session.session.tree
        parents, rows = [tree.root], dict[Node, int]()
        for row, best in enumerate(found[: self.depth], start=1):
            node = _child(tree, parents[-1], best[0])
            if node is None:
                break  # there is no such token
            parents.append(node)
            rows[node] = row
        for step, (parent, best) in enumerate(zip(parents, found[: self.depth], strict=False)):
            for row, token_id in zip(self.beside(step), best[1:], strict=False):
                if (node := _child(tree, parent, token_id)) is not None:
                    rows[node] = row
        for row, node in enumerate(self.known, start=1 + self.num_nodes - len(self.known)):
            # What the draft model has found, too, has two rows, of which the first counts: parents stay in front.
            rows.setdefault(node, row)
        return list(rows), [0, *rows.values()]

    def kept(self, found: Sequence[Sequence[TokenId]], draws: Sequence[TokenId]) -> list[TokenId]:
        """Returns the tokens that a round commits if nothing ends its text.

        Args:
            found: See `settled`.
            draws: The target's token for each row.
        """
        for step, best in enumerate(found[: self.depth]):
            if draws[step] != best[0]:
                token_ids = list(draws[: step + 1])
                for row, token_id in zip(self.beside(step), best[1:], strict=False):
                    if token_id == draws[step]:
                        token_ids.append(draws[row])
                return token_ids
        return list(draws[: 1 + min(self.depth, len(found))])


class RoundBehind(NamedTuple):
    """Describes a round of all sessions behind a draft."""

    draft: PendingDraft
    rows: Mapping[VerifySession, RowsBehind]

    def begin(self, now: float) -> list[Segment]:
        """Begins the round; returns the rows of the sessions, whose token ids are places among `tokens`."""
        segments, first_known = [], self.draft.tokens.token_ids.numel()
        for session, rows in self.rows.items():
            session.begin_early(rows.nodes(session.session.tree.root), now)
            segment = session.segment(0, len(session.nodes))
            segments.append(segment._replace(token_ids=rows.places(self.draft, first_known)))
            first_known += len(rows.known)
        return segments

    def tokens(self, vocab_size: int) -> TokensOnDevice:
        """Returns the draft's tokens and those that are known, see `PendingDraft.tokens_with`."""
        known = [node.token_id for rows in self.rows.values() for node in rows.known]
        return self.draft.tokens_with(known, vocab_size)

    def kept(
        self, draws: Mapping[VerifySession, Sequence[TokenId]]
    ) -> Mapping[VerifySession, Sequence[TokenId]] | None:
        """Returns what the round commits of each session that waits for another draft: of those whose texts do not end.
        None where only the verdicts tell that: all drafts begin together.

        Args:
            draws: The target's token for each row of each session that goes on.
        """
        kept: dict[VerifySession, Sequence[TokenId]] = {}
        for session, of_session in draws.items():
            rows = self.rows[session]
            if session.session.may_cut_text or session.choice.is_auto or session.may_skip_draft or rows.known:
                return None
            token_ids = rows.kept(self.found(session), of_session)
            if not session.ends_with(token_ids):
                kept[session] = token_ids
        return kept

    def go_on(self, kept: Mapping[VerifySession, Sequence[TokenId]]) -> None:
        """Has the draft model go on from what the round commits.

        Args:
            kept: The tokens of each session that waits for another draft.
        """
        # Others are none that a tree takes: such a session is lost with its verdict.
        by_chain = {
            self.rows[session].chain: token_ids
            for session, token_ids in kept.items()
            if max(token_ids) < session.session.spec.vocab_size
        }
        if by_chain:
            self.draft.go_on(by_chain)

    def found(self, session: VerifySession) -> Sequence[Sequence[TokenId]]:
        """Returns the best tokens of each step of a session's chain, none where the draft model has failed."""
        found = self.draft.found()
        return found[self.rows[session].chain] if found else ()


class RoundsBehindDrafts:
    """Chooses the rows of rounds behind drafts, and takes in what they are. Owned by the engine's thread."""

    def __init__(self, timings: EngineTimings) -> None:
        """
        Args:
            timings: What all sessions have measured.
        """
        self._timings = timings
        self._shares = [RunningMean(LEARNING_RATE) for _ in range(NUM_BEST - 1)]
        """Share of the rounds in which a token of each rank beside the chain is right where the chain is not."""

    def plan(self, draft: PendingDraft, sessions: Sequence[VerifySession], max_num_nodes: int) -> RoundBehind | None:
        """Chooses the rows of all sessions behind a draft. None where they should not be verified behind it.

        Args:
            draft: The draft.
            sessions: All that share forwards; at least one.
            max_num_nodes: Most nodes of each.
        """
        numbers = {start.session_id: number for number, start in enumerate(draft.starts)}
        rows: dict[VerifySession, RowsBehind] = {}
        for session in sessions:
            number = numbers.get(session.session.spec.session_id)
            if number is None or not _can_follow(session, draft.starts[number].base_len):
                return None
            depth = min(draft.num_steps, session.session.max_chain_len, self._limit(session, max_num_nodes))
            rows[session] = RowsBehind(number, depth, 0, ())
        if len(numbers) > len(sessions) or not any(each.depth for each in rows.values()):
            return None
        for session, each in rows.items():
            if _may_branch(session):
                known = session.known_nodes()[: self._limit(session, max_num_nodes) - each.depth]
                rows[session] = each._replace(known=known)
        return RoundBehind(draft, self._widened(rows, max_num_nodes))

    def _widened(self, rows: dict[VerifySession, RowsBehind], max_num_nodes: int) -> dict[VerifySession, RowsBehind]:
        """Adds so many tokens beside each of the chains' as bring most in their time, where rows may branch."""
        contexts = Contexts(sum(session.cache.length for session in rows), len(rows))
        num_tokens = sum(1 + session.accepted_per_chain for session in rows)
        best, best_rate = rows, 0.0
        for width in range(NUM_BEST):
            wide = {
                session: each._replace(width=width) if _may_branch(session) else each for session, each in rows.items()
            }
            if width and any(each.num_nodes > self._limit(session, max_num_nodes) for session, each in wide.items()):
                break
            if width:
                num_tokens += sum(each.width > 0 for each in wide.values()) * self._shares[width - 1].get(FIRST_SHARE)
            num_rows = sum(1 + each.num_nodes for each in wide.values())
            forward_ms = self._timings.forward_times.of(num_rows, contexts)
            rate = num_tokens / (self._timings.speculator_ms.get(forward_ms) + forward_ms)
            if rate > best_rate:
                best, best_rate = wide, rate
        return best

    def _limit(self, session: VerifySession, max_num_nodes: int) -> int:
        """Returns the most nodes of a session."""
        if not _may_branch(session):
            return max_num_nodes
        return min(max_num_nodes, session.session.spec.speculation.max_rows or self._timings.max_num_rows)

    def settle(
        self,
        behind: RoundBehind,
        session: VerifySession,
        draws: Sequence[TokenId],
        next_tokens: Sequence[list[Follower]],
    ) -> tuple[list[TokenId], Sequence[list[Follower]]]:
        """Takes in what the nodes of a session's round are; returns what was found for the rows that mean something.

        Args:
            behind: The round.
            session: The session.
            draws: The target's token for each row.
            next_tokens: The most probable ones, if they are wanted.
        """
        rows, found = behind.rows[session], behind.found(session)
        self._learn(found[: rows.depth], draws)
        session.nodes, session.rows = rows.settled(session, found)
        return [draws[row] for row in session.rows], [next_tokens[row] for row in session.rows] if next_tokens else ()

    def _learn(self, found: Sequence[Sequence[TokenId]], draws: Sequence[TokenId]) -> None:
        """Learns what tokens beside the chain are worth."""
        steps = enumerate(zip(found, draws, strict=False))
        refused = next((step for step, (best, drawn) in steps if best[0] != drawn), None)
        for rank, share in enumerate(self._shares, start=1):
            share.add(float(refused is not None and draws[refused] in found[refused][rank : rank + 1]))


def _can_follow(session: VerifySession, base_len: int) -> bool:
    """Returns True if a session's next round may verify a chain that the host does not know yet, and that follows so
    many committed tokens."""
    generation = session.session
    # Nothing is read of a row before it is known what it is.
    is_drawn = generation.is_as_drawn and not generation.decides_by_ratio and generation.spec.report.logprobs is None
    is_next = base_len == len(generation.committed) and session.num_missing == 1
    # In a chain, what is retrieved stands behind what is drafted.
    is_whole = _may_branch(session) or not session.choice.strategy.retrieval
    return session.takes_turns and is_drawn and is_next and is_whole


def _may_branch(session: VerifySession) -> bool:
    return session.choice.strategy.rows is Rows.TREE


def _child(tree: DraftTree, parent: Node, token_id: TokenId) -> Node | None:
    """Returns the node of a token behind another, which may be made for it. None if there cannot be one."""
    return parent.children.get(token_id) or tree.add(parent, token_id, UNTOLD_LOGPROB, Source.DRAFT)
