"""SAGUARO: while the target verifies a chain, the outcomes are predicted and drafted for (Kumar, Dao, May).

An outcome (k, t) of a verification means that the first k tokens of the chain are accepted and t comes next. It is a
node, a sibling of the chain's own token after position k. The draft for it is a chain below it, its rail. All rails
grow at once, by one token with each forward. A commit re-roots the tree: on a hit the outcome is the root and its rail
is the chain under verification, at no cost. On a miss a new chain is drafted.

F_k is the number of outcomes after position k = 0..K of a chain of K tokens (Theorem 12). Let a be the acceptance rate.
The first k tokens are accepted and the next one refused with probability a ** k * (1 - a); all K are accepted with
probability a ** K. The probability that F guesses miss the next token falls like F ** -r. Then, for a given sum of the
F_k, the chance of a hit is greatest if

    F_k = F_0 * a ** (k / (1 + r))  for k < K,        F_K = F_0 * a ** (K / (1 + r)) * (1 - a) ** (-1 / (1 + r)).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.calibration import AcceptanceRate, MissExponent
from outrider.core.departure import logarithm
from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, reach
from outrider.core.params import Rows, check
from outrider.core.speculation import (
    AS_SAMPLED,
    MAX_BUDGET,
    Fallback,
    Method,
    MethodParams,
    Preset,
    SpeculationLimits,
    SpeculationParams,
    Waiting,
    check_range,
)
from outrider.core.tree import DraftTree, Node, NodeState, TokenId

OPEN_PROBABILITY = 0.25
"""The target may wait for more of a chain if the path at which it breaks off is at least so probable."""
MIN_CANDIDATES = 8
"""Least number of candidates that every node wants. The fan-out of a short chain is wider, and may use the candidates
that a rail has left."""
MAX_ROWS = 64
"""Most rails that grow in one forward."""


class FanOut(Enum):
    """The numbers of next tokens that are predicted after each position of a chain. The values are those of the
    wire."""

    GEOMETRIC = 1
    """Fewer after later positions (SAGUARO, Theorem 12), from the measured acceptance rate."""
    UNIFORM = 2
    """Equally many after each position."""
    GIVEN = 3
    """The numbers are those of `SaguaroParams.fan_outs`."""


@dataclass(frozen=True, slots=True)
class SaguaroParams(MethodParams):
    """SAGUARO: the outcomes of a verification are predicted, and drafted for before they are known."""

    fan_out: FanOut = FanOut.GEOMETRIC
    budget: int = 16
    """Outcomes that are drafted for at a time (B, the sum of the F_k)."""
    exponent: float = 0.0
    """Rate at which misses become fewer with the fan-out: their probability falls like F ** -exponent (r). 0 means that
    it is measured in this session."""
    fan_outs: tuple[int, ...] = ()
    """F_k for k = 0, 1, ...; the last one holds for all later positions. Only for GIVEN."""
    fallback: Fallback = Fallback.AUTO
    bias: float = 1.0
    """Factor of the probabilities of the most probable draft tokens before sampling (C of SAGUARO sampling, section
    4.2): below 1, the token after a refusal is more often among the outcomes. Only under the ratio rule."""
    num_biased: int = 0
    """Number of tokens that are scaled by the bias (F). 0 means the fan-out of each position."""

    def __post_init__(self) -> None:
        check_range("saguaro.budget", self.budget, 1, MAX_BUDGET)
        check_range("saguaro.exponent", self.exponent, 0, 10)
        is_given = self.fan_out is FanOut.GIVEN
        check(
            bool(self.fan_outs) == is_given,
            "speculation.saguaro.fan_outs",
            "set for FAN_OUT_GIVEN and only for it",
            list(self.fan_outs),
        )
        for index, count in enumerate(self.fan_outs):
            check_range(f"saguaro.fan_outs[{index}]", count, 0, MAX_BUDGET)
        check(0 <= self.bias <= 1, "speculation.saguaro.bias", "in [0, 1]", self.bias)
        check_range("saguaro.num_biased", self.num_biased, 0, 64)

    def check(self, params: SpeculationParams, limits: SpeculationLimits | None = None) -> None:
        """Checks the fan-outs over all positions, and the fields that need an acceptance rule or retrieval."""
        rule = "1 under the match rule: the bias is of sampled tokens"
        check(params.is_ratio or self.bias == 1, "speculation.saguaro.bias", rule, self.bias)
        check(
            params.retrieves or self.fallback is not Fallback.RETRIEVAL,
            "speculation.saguaro.fallback",
            "another than FALLBACK_RETRIEVAL where retrieval is unset",
            "FALLBACK_RETRIEVAL",
        )
        # Theorem 12 has fan-outs F_k at the positions k = 0 to K, one more than a chain has tokens, under a budget B:
        # here the sum of all F_k. The last one is that of all further positions.
        counts, num_positions = self.fan_outs, params.num_speculative_tokens + 1
        field = "speculation.saguaro.fan_outs"
        check(len(counts) <= num_positions, field, f"at most num_speculative_tokens + 1 ({num_positions})", len(counts))
        if limits is None:
            return
        budget = sum(counts) + (num_positions - len(counts)) * (counts[-1] if counts else 0)
        rule = f"at most {limits.max_budget} in all, this server's limit, over {num_positions} positions"
        check(budget <= limits.max_budget, field, rule, budget)

    def meaningless(self, given: Collection[str], *, is_ratio: bool) -> Iterator[tuple[str, str]]:
        """Yields the fields that the fan-out decides already, and the bias if no draft is sampled."""
        if self.fan_out is FanOut.GIVEN:
            yield "budget", "unset for FAN_OUT_GIVEN: fan_outs say it"
        if self.fan_out is not FanOut.GEOMETRIC:
            yield "exponent", "unset for another fan-out than FAN_OUT_GEOMETRIC"
        if not is_ratio:
            yield "bias", "unset under ACCEPTANCE_RULE_MATCH: the bias is of sampled tokens"
        if not is_ratio or "bias" not in given:
            yield "num_biased", "unset where bias is unset"


@dataclass(slots=True)
class _Rail:
    """The chain below an outcome."""

    outcome: Node
    tip: Node

    def advance(self) -> None:
        """Moves the tip down to the end of the rail."""
        while self.tip.is_expanded and (node := _own_next(self.tip)) is not None:
            self.tip = node


class SaguaroGrowth(GrowthPolicy):
    """The chain under verification, its outcomes and their rails, for one session.

    **Which outcomes.** After position k < K of a chain of K tokens: the F_k most probable candidates besides the
    chain's own next token. After position K: the F_K most probable ones, the chain's own included. There the chain
    simply goes on, as one more rail, even if F_K is 0. F_k is `fan_outs`, by Theorem 12 with the acceptance rate and
    the exponent that this session has shown. A node's forward finds enough candidates for its outcomes, and they are
    kept until the node stands on a chain under verification. So outcomes cost no forward of their own, neither those of
    the first chain nor those of a rail that has become the chain.

    **How far.** A rail has as many tokens as the target verifies at once, fewer if its path below the outcome becomes
    improbable, and none deeper than `lookahead` below the root. If there are more rails than a forward has rows, the
    rails of the more probable outcomes come first.

    **After a miss**, and after a hit with a rail so short that the target may be waiting for more, the chain grows
    alone. It goes out when more of it is not worth waiting for. From then on every forward's nodes go out at once.

    **Under the ratio rule** the chain follows the token that was drawn, and outcomes are picks. A token that was drawn
    is no outcome at its position, which is safe: once refused, it has no residual probability. The time at which a
    drawn token is sent must not depend on the token: if improbable chains were sent early, before the target loses
    patience, and probable ones late, the judged chains would not be fair samples. So the length of a chain that grows
    alone is decided before its first token is drawn, such that its last token but one is kept with
    `min_path_probability` at the acceptance rate seen so far. All other decisions are about nodes that have been sent.
    """

    def __init__(self, params: SpeculationParams) -> None:
        self._min_chain_logprob = params.min_path_logprob
        self._least_awaited_logprob = -math.inf
        self._max_chain_len = params.num_speculative_tokens
        self._lookahead = self._max_depth = params.lookahead
        self._is_ratio = params.is_ratio
        self._params = params.of(SaguaroParams)
        self._acceptance_rate = AcceptanceRate()
        self._exponent = MissExponent()
        self._fan_outs = self._next_fan_outs(self._max_chain_len)
        """F_k for the chain under verification."""
        self._found: dict[Node, tuple[int, ...]] = {}
        """Tokens that a forward found after a node: the chain's token first, then the best ones."""
        self._chain: list[Node] = []
        """The root, and below it the chain under verification as far as it exists. Empty until the first look at the
        tree."""
        self._chain_len = self._max_chain_len
        """Tokens that the chain will have (K)."""
        self._num_candidates = MIN_CANDIDATES
        self._is_alone = False
        self._wanted: list[int] = []
        """For each position of the chain, outcomes that are not nodes yet."""
        self._unused: dict[Node, list[Candidate]] = {}
        """Candidates that a forward found besides a node's child, best first."""
        self._outcomes: list[Child] = []
        """Outcomes that are about to become nodes."""
        self._rails: list[_Rail] = []
        """The most probable outcome first."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the end of the chain while it grows alone, then the ends of all rails."""
        if not self._chain:
            self._begin(tree)
        self._take_in()
        end, last_position = self._chain[-1], tree.root.position + self._max_depth
        nodes = [end] if end.position < last_position and self._may_expand(end) else []
        if not self._is_alone:
            nodes += [rail.tip for rail in self._rails if rail.tip.position < last_position and self._is_growing(rail)]
        # The rails are sorted, so those without a row are below the least probable outcomes.
        return Expansion(tuple(nodes[:MAX_ROWS]), self._num_candidates) if nodes else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the next token of each rail, and outcomes."""
        grown = []
        for node, candidates in zip(expansion.nodes, found, strict=True):
            # After calibration, a lower rank may be more probable.
            ranked = sorted(candidates, key=_rank)
            grown += [Child(node, candidate) for candidate in ranked[:1]]
            self._unused[node] = ranked[1:]
            self._found[node] = tuple(candidate.token_id for candidate in ranked)
        if self._is_alone and grown:
            self._end_chain(tree, grown[-1])
        end = self._chain[-1] if len(self._chain) > self._chain_len else None
        self._outcomes += [child for child in grown if child.parent is end and not self._is_alone]
        return grown + self.known_children(tree)

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns outcomes after positions that have been through a forward."""
        outcomes: list[Child] = []
        for k, node in enumerate(() if self._is_alone else self._chain[: len(self._wanted)]):
            unused = self._unused.get(node, [])
            if self._wanted[k] and unused:
                outcomes += [Child(node, candidate) for candidate in unused[: self._wanted[k]]]
                self._unused[node] = unused[self._wanted[k] :]
                self._wanted[k] = 0
        self._outcomes += outcomes
        return outcomes

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Learns from the verdict, and takes the surviving chain as the chain under verification."""
        if not self._is_alone and self._chain:
            self._learn(tree.committed[-num_tokens:])
        root = tree.root
        self._unused = {
            node: unused for node, unused in self._unused.items() if node is root or node.state is NodeState.LIVE
        }
        self._found = {node: found for node, found in self._found.items() if node in self._unused}
        self._begin(tree)

    def _learn(self, token_ids: Sequence[TokenId]) -> None:
        """Learns the acceptance rate, and how good the guesses are in the place where the target has left the chain."""
        chain = self._chain[1 : 1 + self._chain_len]
        # Only nodes of the chain: a committed outcome next to it is a hit, and the chain's token in that place was
        # refused.
        num_accepted = sum(node.state is NodeState.COMMITTED for node in chain)
        is_refused = num_accepted < min(len(chain), len(token_ids))
        self._acceptance_rate.add(num_accepted, is_refused=is_refused)
        found = self._found.get(self._chain[num_accepted], ())
        if num_accepted >= len(token_ids) or not found:
            return
        # Within the chain, its own token is no outcome; at its end it is the best outcome.
        outcomes = found[1:] if is_refused else found
        said = token_ids[num_accepted]
        self._exponent.add(outcomes.index(said) if said in outcomes else None)

    def draw_bias(self, node: Node) -> tuple[float, int]:
        """Returns the factor of SAGUARO sampling, and the number of most probable tokens that it scales: the number of
        outcomes there, F_k (section 4.2). The probability that scaling takes from q goes to the residual, so the token
        after a refusal is more often among the outcomes.

        It follows from verdicts and from the place in the tree, never from the token that is drawn.
        """
        if self._params.num_biased or self._params.bias >= 1:
            return self._params.bias, self._params.num_biased
        rail = next((rail for rail in self._rails if rail.tip is node), None)
        first = rail.outcome if rail is not None else self._chain[0] if self._chain else node
        place = min(max(0, node.position - first.position), len(self._fan_outs) - 1)
        return self._params.bias, self._fan_outs[place]

    def _next_fan_outs(self, chain_len: int) -> list[int]:
        exponent = self._params.exponent or self._exponent.value
        return fan_outs(self._params, chain_len, self._acceptance_rate.value, exponent)

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Limits the depth of the chain and of the rails. The outcomes stay those of the chain under verification,
        however long the round trip is."""
        self._max_depth = reach(self._lookahead, self._max_chain_len, stale_tokens)
        self._least_awaited_logprob = logarithm(least_awaited)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true, except for a chain that grows alone: it goes out whole."""
        return not self._is_alone

    def _begin(self, tree: DraftTree) -> None:
        """Finds the chain in a tree that another policy may have grown."""
        self._take_in()
        path = [tree.root]
        while (node := _own_next(path[-1])) is not None:
            path.append(node)
        logprobs = [node.path_logprob - tree.root.path_logprob for node in path]
        is_open = self._is_alone or logprobs[-1] >= math.log(OPEN_PROBABILITY)
        self._is_alone = is_open and not self._is_whole(len(path) - 1, logprobs[-1])
        self._rails = [rail for rail in self._rails if rail.tip.state is NodeState.LIVE and rail.tip is not path[-1]]
        if self._is_alone:
            self._chain = path
            self._plan(self._whole_len())
        else:
            self._verify(path, logprobs)

    def _whole_len(self) -> int:
        """Returns the length of a chain that grows alone and does not become improbable."""
        least = max(self._min_chain_logprob, self._least_awaited_logprob)
        if not self._is_ratio or least == -math.inf:
            return self._max_chain_len
        # The rate is below 1 (MAX_ACCEPTANCE_RATE), so its logarithm is not 0.
        return max(1, min(self._max_chain_len, 1 + int(least / math.log(self._acceptance_rate.value))))

    def _is_whole(self, length: int, logprob: float) -> bool:
        """Returns True if a chain of this length and log-probability need not grow alone any more."""
        least = max(self._min_chain_logprob, self._least_awaited_logprob)
        return length >= self._whole_len() or (not self._is_ratio and length > 0 and logprob <= least)

    def _end_chain(self, tree: DraftTree, child: Child) -> None:
        """Ends a chain that grows alone if it is whole with this token."""
        parent, candidate = child
        path_logprobs = [node.path_logprob for node in self._chain] + [parent.path_logprob + candidate.logprob]
        logprobs = [logprob - tree.root.path_logprob for logprob in path_logprobs]
        if self._is_whole(len(self._chain), logprobs[-1]):
            self._is_alone = False
            self._verify(self._chain, logprobs)

    def _verify(self, path: list[Node], logprobs: Sequence[float]) -> None:
        """Plans for the chain that the target takes of a path; the rest of the path is a rail.

        Args:
            path: The root, and a chain below it.
            logprobs: Log-probabilities of the path down to each node, relative to the root. There may be one more, of a
                token that is not a node yet.
        """
        chain_len = min(len(logprobs) - 1, self._max_chain_len)
        for k in range(2, chain_len + 1):  # its first token always stands
            # As in `DraftTree.best_chain`: a sampled token must not decide whether it is judged itself.
            if logprobs[k - 1 if self._is_ratio else k] < self._min_chain_logprob:
                chain_len = k - 1
                break
        self._chain = path[: chain_len + 1]
        if len(path) > len(self._chain):
            self._add_rails([_Rail(path[chain_len + 1], path[-1])])
        self._plan(chain_len)

    def _plan(self, chain_len: int) -> None:
        """Decides how many outcomes a chain of this length wants besides the existing ones."""
        self._chain_len = chain_len
        self._fan_outs = self._next_fan_outs(chain_len)
        counts = list(self._fan_outs)
        # One more than the outcomes, because the chain's own next token is a candidate, too.
        self._num_candidates = max(MIN_CANDIDATES, 1 + max(counts))
        # After the whole chain, that token is itself one of the F_K outcomes.
        counts[-1] = max(0, counts[-1] - 1)
        present = [max(0, len(node.children) - 1) for node in self._chain]
        room = sum(counts) - sum(present)
        self._wanted = []
        for k, count in enumerate(counts):
            missing = count - present[k] if k < len(present) else count
            self._wanted.append(max(0, min(missing, room)))
            room -= self._wanted[-1]

    def _take_in(self) -> None:
        """Finds the nodes that were added last."""
        while 0 < len(self._chain) <= self._chain_len and (node := _own_next(self._chain[-1])) is not None:
            self._chain.append(node)
        if self._outcomes:
            found = [parent.children.get(candidate.token_id) for parent, candidate in self._outcomes]
            self._outcomes = []
            self._add_rails([_Rail(node, node) for node in found if node is not None])
        for rail in self._rails:
            rail.advance()

    def _add_rails(self, rails: list[_Rail]) -> None:
        self._rails = sorted([*self._rails, *rails], key=lambda rail: -rail.outcome.path_logprob)

    def _is_growing(self, rail: _Rail) -> bool:
        tip, outcome = rail.tip, rail.outcome
        return (
            not tip.is_expanded
            and tip.position - outcome.position < self._max_chain_len
            and tip.path_logprob - outcome.path_logprob >= self._min_chain_logprob
        )

    def _may_expand(self, end: Node) -> bool:
        # A root without candidates after its forward goes through another one.
        is_barren = end.state is NodeState.COMMITTED and not end.children and end not in self._unused
        return not end.is_expanded or is_barren


def _own_next(node: Node) -> Node | None:
    """Returns the child with which a chain goes on: the drawn one, otherwise that of `DraftTree.best_chain`."""
    if len(node.children) < 2:
        return next(iter(node.children.values()), None)
    return min(node.children.values(), key=lambda child: (child.q is None, -child.logprob, child.token_id))


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    """Returns the key that orders candidates as `_own_next` orders nodes."""
    return candidate.q is None, -candidate.logprob, candidate.token_id


def fan_outs(params: SaguaroParams, chain_len: int, acceptance_rate: float, exponent: float) -> list[int]:
    """Returns F_k for k = 0..chain_len. Their sum is the budget, unless the parameters give them."""
    match params.fan_out:
        case FanOut.GEOMETRIC:
            return apportioned(params.budget, geometric_shares(chain_len, acceptance_rate, exponent))
        case FanOut.UNIFORM:
            return apportioned(params.budget, [1.0] * (chain_len + 1))
        case FanOut.GIVEN:
            last = len(params.fan_outs) - 1
            return [params.fan_outs[min(k, last)] for k in range(chain_len + 1)]


def geometric_shares(chain_len: int, acceptance_rate: float, exponent: float) -> list[float]:
    """Returns F_k / F_0 of Theorem 12 for k = 0..chain_len.

    Raises:
        ValueError: The acceptance rate is not in (0, 1): at 0 and 1 the theorem gives everything to one end of the
            chain.
    """
    if not 0 < acceptance_rate < 1:
        raise ValueError(f"acceptance_rate must be in (0, 1), got {acceptance_rate}")
    ratio = acceptance_rate ** (1 / (1 + exponent))
    shares = [ratio**k for k in range(chain_len + 1)]
    # After the whole chain no token is refused: its probability lacks the factor 1 - a of the others.
    shares[-1] *= (1 - acceptance_rate) ** (-1 / (1 + exponent))
    return shares


def apportioned(budget: int, shares: Sequence[float]) -> list[int]:
    """Returns whole numbers in proportion to `shares` whose sum is `budget`.

    They are rounded down, and the rest goes to the largest remainders; among equals, to the earlier one.
    """
    total = sum(shares)
    quotas = [budget * share / total for share in shares]
    counts = [int(quota) for quota in quotas]
    # `sorted` is stable, which puts the earlier of equals first.
    by_remainder = sorted(range(len(quotas)), key=lambda k: counts[k] - quotas[k])
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return counts


def _waiting(params: SpeculationParams) -> Waiting:
    """Returns the waiting that the fallback asks for: always, to draft now; while it pays in a batch of this size, for
    the cheapest reaction; never, for anything but a draft."""
    waiting = {Fallback.AUTO: Waiting.BY_BATCH, Fallback.DRAFT: Waiting.ALWAYS}
    return waiting.get(params.of(SaguaroParams).fallback, Waiting.NEVER)


METHOD = Method(
    "saguaro",
    "a chain, and more chains for the likely outcomes of its check",
    "#44AA99",
    "grammar",
    parameters=SaguaroParams,
    grow=SaguaroGrowth,
    waiting=_waiting,
    samples=True,
    fallback=lambda params: params.of(SaguaroParams).fallback,
    published=Preset(
        "Speculative Speculative Decoding, Kumar, Dao and May",
        fixed={
            **AS_SAMPLED,
            "retrieval": False,
            "rows": Rows.CHAIN,
            "saguaro": {"fan_out": FanOut.GEOMETRIC, "fallback": Fallback.AUTO, "exponent": 0.0},
        },
        tunable={"num_speculative_tokens": 5, "saguaro": {"budget": 16}},
    ),
)
