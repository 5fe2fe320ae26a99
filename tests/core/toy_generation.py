"""A generation under the ratio rule between two toy models. Everything else is real: growth policy, trees, session,
acceptance. Chance decides when the target loses patience, and how long it computes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Protocol

import numpy as np
from scipy import stats

from outrider.core.acceptance import DraftNoise, sampled_candidates, sparse_row
from outrider.core.calibration import RetrievalCalibration
from outrider.core.growth import Candidate, Expansion, GrowthPolicy
from outrider.core.methods import DOUBLE, SPECULATIVE, growth_policy
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.params import AcceptanceRule, SamplingParams, Source
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.pool import agreed_phrases
from outrider.core.retrieval.retriever import Retriever
from outrider.core.session import Session, SessionSpec, Verdict
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import DraftTree, Node, NodeState, SparseRow
from tests.support.ratio_rule import judge
from tests.support.trees import output_of

VOCAB_SIZE = 5
NUM_DRAWN_FROM = 4
"""Tokens of a draft's row: one is always cut off."""
LENGTH = 4
"""Tokens of a text."""
PROMPT = (0, 1)
Context = tuple[int, int]

_random = np.random.default_rng(3)
TARGET = {c: _random.dirichlet([0.7] * VOCAB_SIZE).tolist() for c in product(range(VOCAB_SIZE), repeat=2)}
DRAFT = {c: (0.6 * np.array(p) + 0.4 * _random.dirichlet([0.8] * VOCAB_SIZE)).tolist() for c, p in TARGET.items()}
"""Probabilities of the next token after the last two."""


@dataclass(frozen=True)
class DraftRow:
    """The draft model's row after a context."""

    token_ids: list[int]
    logprobs: list[float]
    q: SparseRow


@cache
def draft_row(context: Context, bias: float = 1.0) -> DraftRow:
    probabilities = DRAFT[context]
    token_ids = sorted(range(VOCAB_SIZE), key=lambda t: -probabilities[t])[:NUM_DRAWN_FROM]
    kept = [probabilities[t] for t in token_ids]
    return DraftRow(token_ids, [math.log(p / sum(kept)) for p in kept], sparse_row(token_ids, kept, bias, 2))


CALIBRATION = RetrievalCalibration()
"""Shared, as by the sessions of a verifier."""
Find = Callable[[Context, int, float, int], list[Candidate]]


def sampled(context: Context, word: int, bias: float, k: int) -> list[Candidate]:
    """The candidates that the speculator's engine finds."""
    row = draft_row(context, bias)
    return sampled_candidates(row.q, row.token_ids, row.logprobs, word, k)


def retrieved(context: Context) -> tuple[int, ...]:
    """A datastore's continuation, as a function of the context."""
    first = (2 * context[0] + context[1] + 1) % VOCAB_SIZE
    return first, (first + context[1]) % VOCAB_SIZE


class Noise(Protocol):
    """The noise that drafts are drawn with."""

    def words(self, tree: DraftTree, expansion: Expansion) -> list[int]: ...


Judge = Callable[[Sequence[Sequence[float]], Sequence[Node], int, int], list[int]]


@dataclass
class Rules:
    """The rules of a generation. Tests replace them by wrong ones."""

    params: SpeculationParams
    judge: Judge = judge
    find: Find = sampled
    make_policy: Callable[[SpeculationParams], GrowthPolicy] = growth_policy
    make_noise: Callable[[int], Noise] = DraftNoise
    cuts_by_own_value: bool = False
    sources: tuple[Source, ...] = ()
    """The verifier's own sources that continue a chain."""
    is_ranked_by_noise: bool = False
    """True if the sources rank with the target's noise, which is right under the match rule only."""
    max_patience: int = 5
    """The target goes on without a draft after a random number of draft forwards, at most this."""
    moments: random.Random = field(default_factory=lambda: random.Random(5))


class ToyGeneration:
    """One generation of LENGTH tokens."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rules = rules
        params = rules.params
        sampling = SamplingParams(seed=seed)
        # One token more than is looked at: the last one is never drafted.
        self.session = Session(SessionSpec("s", PROMPT, sampling, params, VOCAB_SIZE, LENGTH + 1))
        if rules.cuts_by_own_value:
            self.session.decides_by_ratio = False
        self.seed = seed
        self.verdicts: list[Verdict] = []
        self._tree = DraftTree(PROMPT, VOCAB_SIZE)
        self._policy = rules.make_policy(params)
        self._noise = rules.make_noise(seed)
        self._expansion = self._policy.next_expansion(self._tree)
        self._unsent: list[Node] = []
        self._mirrored: dict[Node, Node] = {}
        self._is_double = params.method is DOUBLE
        self._bias = params.of(SaguaroParams).bias
        self._retriever: Retriever | None = None
        if rules.sources:
            plan = RetrievalPlan(sources=rules.sources, is_ranked_by_noise=rules.is_ranked_by_noise)
            self._retriever = Retriever(PROMPT, len(PROMPT), sampling, CALIBRATION, plan=plan)

    def text(self) -> list[int]:
        """The first LENGTH tokens."""
        while self.session.num_output_tokens < LENGTH:
            self.round()
        return output_of(self.session)[:LENGTH]

    def round(self) -> None:
        """The target waits for something to verify, or until its patience ends; the draft keeps growing."""
        rules, session = self.rules, self.session
        patience = int(rules.moments.random() * (rules.max_patience + 1))
        chain = session.next_chain()
        while not chain and patience and self._expansion is not None:
            patience -= 1
            if self._grow():
                chain = session.next_chain()
        if self._is_double:
            chain = self._with_tail(chain)
        if self._retriever is not None:
            chain = self._continued(chain, self._retriever)
        contexts = [self._context(session.tree, node) for node in (session.tree.root, *chain)]
        draws = rules.judge([TARGET[c] for c in contexts], chain, self.seed, session.num_output_tokens)
        if self._retriever is not None:
            self._learn(self._retriever, chain, contexts, draws)
        for _ in range(int(rules.moments.random() * 2)):
            if self._expansion is not None:
                self._grow()
        # A wrong rule may emit the very token that it has refused.
        verdict = session.apply(chain if rules.judge is judge else chain[: len(draws) - 1], draws)
        self.verdicts.append(verdict)
        self._commit(draws)

    def _with_tail(self, chain: list[Node]) -> list[Node]:
        tree = self.session.tree
        tip = chain[-1] if chain else tree.root
        if any(child.q is not None for child in tip.children.values()):
            return chain
        tail: list[Node] = []
        for token_id in retrieved(self._context(tree, tip))[: self.session.num_wanted - 1 - len(chain)]:
            node = tree.add(tail[-1] if tail else tip, token_id, -0.7, Source.PRIOR)
            assert node is not None
            tail.append(node)
        return chain + tail

    def _continued(self, chain: list[Node], retriever: Retriever) -> list[Node]:
        """Continues a chain with known tokens where it has no nodes yet, as a verifier's session does."""
        session = self.session
        tip, missing = chain[-1] if chain else session.tree.root, session.max_chain_len - len(chain)
        if tip.children or missing <= 0:
            return chain
        retriever.grow(session.tree, tip, [node.token_id for node in chain], missing)
        return session.next_chain()

    def _learn(self, retriever: Retriever, chain: list[Node], contexts: list[Context], draws: list[int]) -> None:
        """Learns from the target's rows, including those after a refused token."""
        rows = []
        for context in contexts:
            probable = sorted(range(VOCAB_SIZE), key=lambda token, row=TARGET[context]: -row[token])  # type: ignore[misc]
            rows.append((context[1], [(token, 1 + round(1000 * TARGET[context][token])) for token in probable]))
        retriever.recycle(rows)
        retriever.learn_phrases(agreed_phrases(self.session.tree.root, chain, draws))

    def _context(self, tree: DraftTree, node: Node) -> Context:
        parent = node.parent
        if parent is None:
            return tree.committed[-2], tree.committed[-1]
        return parent.token_id, node.token_id

    def _grow(self) -> bool:
        """Runs one draft forward. Returns True if it ended with a message."""
        tree, expansion, policy = self._tree, self._expansion, self._policy
        assert expansion is not None
        if self._is_double:
            phrase = retrieved(self._context(tree, expansion.nodes[0]))[: expansion.max_len - 1]
            expansion = expansion._replace(phrase=phrase)
        words = self._noise.words(tree, expansion)
        for node in expansion.nodes:
            node.is_expanded = True
        if expansion.phrase:
            self._grow_phrase(expansion, words)
        else:
            contexts = [self._context(tree, node) for node in expansion.nodes]
            k = expansion.num_children
            found = [self.rules.find(c, w, self._bias, k) for c, w in zip(contexts, words, strict=True)]
            for parent, candidate in policy.children(tree, expansion, found):
                self._add(parent, candidate)
        self._expansion = policy.next_expansion(tree)
        if not self._unsent or not (self._expansion is None or policy.is_message(tree, len(self._unsent))):
            return False
        self._send()
        return True

    def _grow_phrase(self, expansion: Expansion, words: list[int]) -> None:
        """Draws as `Drafting` does: the tokens of the phrase that the draft model draws itself, and one more."""
        node = expansion.nodes[0]
        for index, word in enumerate(words):
            candidate = self.rules.find(self._context(self._tree, node), word, self._bias, 1)[0]
            node.is_expanded = True
            node = self._add(node, candidate)
            if index == len(expansion.phrase) or candidate.token_id != expansion.phrase[index]:
                return

    def _add(self, parent: Node, candidate: Candidate) -> Node:
        before = self._tree.num_nodes
        node = self._tree.add(parent, candidate.token_id, candidate.logprob, Source.DRAFT, candidate.q)
        assert node is not None
        if self._tree.num_nodes > before:
            self._unsent.append(node)
        return node

    def _send(self) -> None:
        mirror = self.session.tree
        for node in self._unsent:
            assert node.parent is not None
            parent = mirror.root if node.parent is self._tree.root else self._mirrored[node.parent]
            mirrored = mirror.add(parent, node.token_id, node.logprob, Source.DRAFT, node.q)
            assert mirrored is not None
            self._mirrored[node] = mirrored
        self._unsent = []

    def _commit(self, token_ids: list[int]) -> None:
        if self._retriever is not None:
            self._retriever.judge_siblings(len(self.session.committed) - len(token_ids), token_ids)
            self._retriever.commit(token_ids)
        tree = self._tree
        num_known = tree.commit(token_ids)
        self._unsent = [node for node in self._unsent if node.state is NodeState.LIVE]
        self._policy.committed(tree, len(token_ids), num_known)
        for parent, candidate in self._policy.known_children(tree):
            self._add(parent, candidate)
        self._expansion = self._policy.next_expansion(tree)


def params_of(method: Method, probability: float = 0.0, **saguaro: float) -> SpeculationParams:
    """Short chains: texts are short."""
    gamma = 3 if method is SPECULATIVE else 2
    return SpeculationParams(
        method,
        num_speculative_tokens=gamma,
        lookahead=gamma if method is SPECULATIVE else 2 * gamma,
        min_path_probability=probability,
        acceptance_rule=AcceptanceRule.RATIO,
        shared_noise=False,
        own=(SaguaroParams(budget=3, **saguaro),),  # type: ignore[arg-type]
    )


def texts(rules: Rules, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Texts of so many generations, each with its own seed: int64 [count, LENGTH]."""
    return np.array([ToyGeneration(rules, seed).text() for seed in range(count)])


@cache
def law(length: int) -> tuple[float, ...]:
    """The exact probability of every text of a length, indexed by the number with the text's tokens as digits."""
    probabilities = []
    for text in product(range(VOCAB_SIZE), repeat=length):
        tokens, probability = [*PROMPT, *text], 1.0
        for index in range(length):
            probability *= TARGET[tokens[index], tokens[index + 1]][tokens[index + 2]]
        probabilities.append(probability)
    return tuple(probabilities)


def p_value(found: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    """Probability that texts of the target's law deviate as much as these: the least of a chi-square test for each
    prefix length, times their number."""
    least = 1.0
    for length in range(1, LENGTH + 1):
        numbers = np.zeros(len(found), dtype=np.int64)
        for place in range(length):
            numbers = numbers * VOCAB_SIZE + found[:, place]
        counts = np.bincount(numbers, minlength=VOCAB_SIZE**length).astype(float)
        expected = np.array(law(length)) * len(found)
        rare = expected < 5
        if rare.any():
            counts = np.append(counts[~rare], counts[rare].sum())
            expected = np.append(expected[~rare], expected[rare].sum())
        least = min(least, float(stats.chisquare(counts, expected).pvalue))
    return min(1.0, least * LENGTH)
