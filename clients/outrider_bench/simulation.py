"""A simulation of what a draft could bring over a network: one session in simulated time, whose drafter knows the odds.

The target's text is random: its next token is the draft's first choice, its second, ..., or none of them, with given
odds. The drafter grows the tree best first by those very odds, and the verifier takes the chain or the sub-tree that
they recommend; so what comes out is what a perfectly calibrated best-first tree brings at these costs, and a bound to
hold a measurement against. Nothing here has a clock: all times are made up, in milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import numpy as np

from outrider.core.costs import DraftTimings, ForwardTimes, num_worth, patience_ms
from outrider.core.speculation import Waiting
from outrider.core.statistics import RunningMean

MIN_EXPANDED = 0.001
"""A node whose path is less probable is not expanded before a commit makes it more probable."""


@dataclass(frozen=True, slots=True)
class SimulatedCosts:
    """Times in milliseconds."""

    target_ms: ForwardTimes
    """Times of a target forward, by its rows."""
    draft_ms: ForwardTimes
    """Times of a draft forward, by its nodes."""
    round_trip_ms: float = 0.0
    """Time of a message and its answer, without the work in between."""
    overhead_ms: float = 0.0
    """Time of a round beside its forward."""


@dataclass(frozen=True, slots=True)
class SimulatedMethod:
    """Says how the tree grows, and what is verified of it."""

    num_expanded: int = 8
    """Nodes of a draft forward."""
    lookahead: int = 64
    """Tokens beyond the committed ones, as the drafter knows them."""
    max_rows: int = 32
    """Drafted rows of a target forward."""
    is_tree: bool = True
    """True if they are a sub-tree, or one chain."""
    waiting: Waiting = Waiting.WORTH
    """Decides what the target does when there is nothing to verify."""


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """Holds what a simulated session came to."""

    num_tokens: int
    num_rounds: int
    time_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """The speed."""
        return self.num_tokens / self.time_ms

    @property
    def tokens_per_round(self) -> float:
        """The target's own included."""
        return self.num_tokens / self.num_rounds


def simulate(
    odds: Odds, costs: SimulatedCosts, method: SimulatedMethod, num_tokens: int, seed: int
) -> SimulatedOutcome:
    """Simulate a session of at least `num_tokens`. The same seed gives the same text, at all costs."""
    text = _Text(odds, seed)
    drafter = _Drafter(odds, costs, method, text.root)
    root, now, committed_at = text.root, 0.0, 0.0
    accepted = RunningMean()
    num_committed = num_rounds = 0
    while num_committed < num_tokens:
        drafter.run_until(now)
        if not _arrived(root, now):
            # Until a chain has been judged, what the odds promise stands in for the running mean.
            usual = accepted.get(odds.chain_value(method.max_rows))
            deadline = committed_at + _patience_ms(costs, method, usual)
            now = _wait(drafter, root, now, deadline, costs.draft_ms.of(1))
        nodes = _worth_verifying(root, now, costs, method)
        end = now + costs.target_ms.of(1 + len(nodes))
        # What arrives meanwhile is not in this forward.
        num_kept, root = text.verdict(root, nodes)
        if nodes:
            accepted.add(num_kept)
        num_committed += num_kept + 1
        num_rounds += 1
        committed_at, now = end, end + costs.overhead_ms
        # At the pace so far, the target is this many tokens further when an answer to the commit comes back.
        drafter.post(end + costs.round_trip_ms / 2, root, costs.round_trip_ms * num_committed / now)
    return SimulatedOutcome(num_committed, num_rounds, now)


class _Node:
    """A token at a place of the tree: a choice of the draft, or what the target said instead."""

    __slots__ = ("arrives_ms", "children", "is_expanded", "is_known", "log_probability", "position", "run")

    def __init__(self, position: int, run: int, log_probability: float) -> None:
        self.position = position
        self.run = run
        """First choices in a row up to here."""
        self.log_probability = log_probability
        """Log-probability of the whole path from the first token."""
        self.children: dict[int, _Node] = {}
        self.is_expanded = False
        self.is_known = False
        """The drafter knows of it."""
        self.arrives_ms = math.inf
        """Time at which the verifier has it."""

    def child(self, rank: int, log_probability: float) -> _Node:
        """Return the child of that rank; make it if there is none."""
        if rank not in self.children:
            run = self.run + 1 if rank == 0 else 0
            self.children[rank] = _Node(self.position + 1, run, self.log_probability + log_probability)
        return self.children[rank]


class _Text:
    """Draws the target's text: the ranks of its tokens, at the given odds."""

    def __init__(self, odds: Odds, seed: int) -> None:
        self.root = _Node(0, 0, 0.0)
        self._odds = odds
        self._random = np.random.default_rng(seed)
        self._ranks: list[int] = []
        self._run = 0

    def verdict(self, root: _Node, nodes: Sequence[_Node]) -> tuple[int, _Node]:
        """Return the number of tokens kept, and the new root: the token that the target says next."""
        # By identity: two nodes of the same rank at the same position are different texts.
        verified, num_kept = set(map(id, nodes)), 0
        while True:
            # If the draft had no such child, one is made: it is the path that the text takes, with or without drafts.
            root = root.child(self._rank_at(root.position), 0.0)
            if id(root) not in verified:
                return num_kept, root
            num_kept += 1

    def _rank_at(self, position: int) -> int:
        # Drawn in the order of positions and kept: costs and methods cannot change which text a seed gives.
        while len(self._ranks) <= position:
            choice = int(np.searchsorted(np.cumsum(self._odds.after(self._run)), self._random.random(), side="right"))
            rank = choice if choice < len(self._odds.after(self._run)) else NO_CHOICE
            self._ranks.append(rank)
            self._run = self._run + 1 if rank == 0 else 0
        return self._ranks[position]


class _Drafter:
    """Grows the tree, one forward after the other; commits are taken in between two of them."""

    def __init__(self, odds: Odds, costs: SimulatedCosts, method: SimulatedMethod, root: _Node) -> None:
        self._odds, self._costs, self._method = odds, costs, method
        self._root = root
        self._least = 0.0
        """Log-probability of a path from which on a node is expanded."""
        self._now = 0.0
        self._stale_tokens = 0.0
        self._running: tuple[float, list[_Node]] | None = None
        self._commits: deque[tuple[float, _Node, float]] = deque()
        self._frontier: list[tuple[float, int, _Node]] = []
        self._ages = count()
        self._move_to(root)

    def post(self, arrives_ms: float, root: _Node, stale_tokens: float) -> None:
        """A commit is on its way. `stale_tokens`: how far the target is when an answer has arrived."""
        self._commits.append((arrives_ms, root, stale_tokens))

    def run_until(self, until: float) -> None:
        """Everything that happens up to a moment; a forward that ends later goes on."""
        while True:
            if self._running is not None:
                end, nodes = self._running
                # A forward under way is not interrupted: commits wait for its end, as at the speculator.
                if end > until:
                    return
                self._now, self._running = end, None
                self._grow(nodes)
            while self._commits and self._commits[0][0] <= self._now:
                _, root, self._stale_tokens = self._commits.popleft()
                self._move_to(root)
            if nodes := self._take():
                self._running = self._now + self._costs.draft_ms.of(len(nodes)), nodes
            elif self._commits and self._commits[0][0] <= until:
                self._now = self._commits[0][0]
            else:
                self._now = max(self._now, until)
                return

    def _move_to(self, root: _Node) -> None:
        """Move to a commit: forget what is not below it, and order the rest again."""
        root.is_known = True
        self._root, self._frontier = root, []
        self._least = root.log_probability + math.log(MIN_EXPANDED)
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if not node.is_expanded:
                self._push(node)
            elif node.log_probability >= self._least:
                waiting += [child for child in node.children.values() if child.is_known]

    def _push(self, node: _Node) -> None:
        """Orders by the probability of the node's path where it begins to count: before that, it is of no use."""
        if node.log_probability < self._least:
            return
        missing = max(0.0, self._stale_tokens - (node.position - self._root.position))
        # What lies between the node and the place where drafts are of use again is taken for first choices in a row.
        # Of odds of 0 there is no logarithm: such a path is worth nothing, unless nothing lies between.
        first = self._odds.after(node.run)[0]
        worth = node.log_probability + (missing * math.log(first) if first else -math.inf if missing else 0.0)
        # The age decides between equals, the older first: nodes themselves cannot be compared.
        heapq.heappush(self._frontier, (-worth, next(self._ages), node))

    def _take(self) -> list[_Node]:
        deepest = self._root.position + self._method.lookahead
        taken: list[_Node] = []
        while self._frontier and len(taken) < self._method.num_expanded:
            _, _, node = heapq.heappop(self._frontier)
            if node.position < deepest:
                taken.append(node)
        return taken

    def _grow(self, nodes: Sequence[_Node]) -> None:
        arrives_ms = self._now + self._costs.round_trip_ms / 2
        for node in nodes:
            node.is_expanded = True
            for rank, probability in enumerate(self._odds.after(node.run)):
                if probability > 0:
                    child = node.child(rank, math.log(probability))
                    # Set anew: the text may have made this child before, with a certainty that no drafter has.
                    child.log_probability = node.log_probability + math.log(probability)
                    child.is_known, child.arrives_ms = True, arrives_ms
                    self._push(child)


def _patience_ms(costs: SimulatedCosts, method: SimulatedMethod, accepted_per_chain: float) -> float:
    latency_ms = costs.round_trip_ms + costs.draft_ms.of(1)
    pace = DraftTimings(latency_ms, costs.target_ms.of(1) + costs.overhead_ms, accepted_per_chain, 0)
    return patience_ms(method.waiting, pace)


def _wait(drafter: _Drafter, root: _Node, now: float, deadline: float, step_ms: float) -> float:
    """When the next round begins: with the first draft, or when patience ends."""
    while now < deadline and not _arrived(root, now):
        coming = min((child.arrives_ms for child in root.children.values()), default=math.inf)
        # In steps: the drafter must not live in a time from which the next commit may still call it back.
        now = min(deadline, coming, now + step_ms)
        drafter.run_until(now)
    return now


def _arrived(node: _Node, now: float) -> list[_Node]:
    return [child for child in node.children.values() if child.arrives_ms <= now]


def _worth_verifying(root: _Node, now: float, costs: SimulatedCosts, method: SimulatedMethod) -> list[_Node]:
    """Choose as much of what has arrived as brings the most tokens in the time."""
    best = _best_subtree if method.is_tree else _best_chain
    nodes = best(root, lambda node: _arrived(node, now), method.max_rows)
    probabilities = [math.exp(node.log_probability - root.log_probability) for node in nodes]
    return nodes[: num_worth(probabilities, costs.target_ms, overhead_ms=costs.overhead_ms)]


def _best_subtree(root: _Node, children: Callable[[_Node], list[_Node]], max_rows: int) -> list[_Node]:
    """Return the most probable nodes, most probable first: a parent is never less probable than its children."""
    ages, found = count(), list[_Node]()
    open_nodes = [(-node.log_probability, next(ages), node) for node in children(root)]
    heapq.heapify(open_nodes)
    while open_nodes and len(found) < max_rows:
        _, _, node = heapq.heappop(open_nodes)
        found.append(node)
        for child in children(node):
            heapq.heappush(open_nodes, (-child.log_probability, next(ages), child))
    return found


def _best_chain(root: _Node, children: Callable[[_Node], list[_Node]], max_rows: int) -> list[_Node]:
    """Follow the most probable child from node to node."""
    found: list[_Node] = []
    while len(found) < max_rows and (below := children(found[-1] if found else root)):
        found.append(max(below, key=lambda node: node.log_probability))
    return found


NO_CHOICE = -1
"""The rank of a token that the draft did not choose at all."""


@dataclass(frozen=True, slots=True)
class Odds:
    """Holds the odds that the target's token is the draft's choice number 0, 1, 2, ...

    `by_run[i]` holds where the i tokens before were first choices, the one before those was not; the last entry holds
    for all longer runs. Where a draft is right, it mostly goes on to be: in a mirror that is one chain, the run is the
    depth.
    """

    by_run: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for row in self.by_run:
            if not row or min(row) < 0 or sum(row) > 1 + 1e-9:
                raise ValueError(f"odds must be at least one probability, with a sum of at most 1, got {row}")
        if not self.by_run:
            raise ValueError("there must be odds after a run of 0")

    @classmethod
    def measured(cls, texts: Iterable[Sequence[int]], num_ranks: int, max_run: int = 16) -> Self:
        """The odds in texts that were watched: for each token the rank it had; NO_CHOICE, or a rank beyond, = none.

        Runs that were seen fewer than `num_ranks` times count together with all longer ones, as do those of `max_run`.
        """
        counts = np.zeros((max_run + 1, num_ranks + 1))  # the last column counts tokens that were no choice
        for ranks in texts:
            run = 0
            for rank in ranks:
                counts[run, rank if 0 <= rank < num_ranks else num_ranks] += 1
                run = min(max_run, run + 1) if rank == 0 else 0
        rows: list[Any] = []
        for run in range(max_run + 1):
            longer = counts[run:].sum(axis=0)
            is_last = counts[run].sum() < num_ranks
            if rows and longer.sum() < num_ranks:
                break
            rows.append(longer if is_last else counts[run])
            if is_last:
                break
        return cls(tuple(tuple((row / max(1.0, row.sum()))[:num_ranks].tolist()) for row in rows))

    def after(self, run: int) -> tuple[float, ...]:
        """Return the odds after `run` first choices in a row."""
        return self.by_run[min(run, len(self.by_run) - 1)]

    def chain_value(self, max_len: int) -> float:
        """Count the tokens that are kept of a chain of first choices, right after one that was none."""
        value, probability = 0.0, 1.0
        for run in range(max_len):
            probability *= self.after(run)[0]
            value += probability
        return value
