"""One session of the speculator: its tree, its place in the packed forward, and what it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import takewhile

from outrider.core.acceptance import DraftNoise, decides_by_ratio
from outrider.core.adjustments import Adjustment, TextAdjustments
from outrider.core.calibration import AcceptanceRate, DraftCalibration, PendingClaims, RetrievalCalibration
from outrider.core.costs import path_probabilities
from outrider.core.departure import AwaitedDraft, PairTimes, least_awaited, tokens_of_hit
from outrider.core.growth import NO_BIAS, Candidate, Expansion, GrowthPolicy
from outrider.core.methods import growth_policy
from outrider.core.params import SamplingParams, Source
from outrider.core.retrieval.retriever import TierSource
from outrider.core.retrieval.sides import draft_plan
from outrider.core.speculation import SpeculationParams, Steering, Waiting
from outrider.core.statistics import RunningMean
from outrider.core.structure import Matcher, StructureBroken, StructuredText
from outrider.core.tree import Draft, DraftTree, Node, TokenId, path_to
from outrider.models.acceptance import DraftDraw
from outrider.models.prefill import MIN_PREFILL_ROWS
from outrider.models.runner import KVCache, Segment
from outrider.models.sampling import Logits
from outrider.models.structure import mask_row
from outrider.speculator.metrics import DraftCounts
from outrider.speculator.outbox import Outbox
from outrider.speculator.phrases import Phrases
from outrider.speculator.slots import Slots

MAX_STEPS_AHEAD = 8
"""Most forwards of a chain that are made at once while the target verifies: its commit waits for them."""


@dataclass(frozen=True, slots=True)
class DraftSessionSpec:
    """The opening of a session. All values have been checked."""

    session_id: str
    committed_token_ids: tuple[TokenId, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationParams
    vocab_size: int
    begins_paused: bool = False
    """True if nothing is read or grown before the caller steers."""
    prefix_salt: str = ""
    """Sessions of the same salt find each other's prefixes; empty means that this one shares none."""
    matcher: Matcher | None = None
    """Follows the output through its structure, and stands at its beginning. None means that it has none."""


class DraftSession:
    """Grows the draft tree of one generation. Owned by the engine's thread."""

    def __init__(
        self,
        spec: DraftSessionSpec,
        cache: KVCache,
        max_context_len: int,
        calibration: RetrievalCalibration | None = None,
        tiers: TierSource | None = None,
        draft_calibration: DraftCalibration | None = None,
        counts: DraftCounts | None = None,
        num_at_once: int = 1,
        times: PairTimes | None = None,
    ) -> None:
        """
        Args:
            spec: Prompt and parameters.
            cache: Empty; for this session alone.
            max_context_len: Slots that the draft model has room for.
            calibration: Rates at which the target agrees with retrieved tokens, shared by all sessions.
            tiers: Copies of a datastore's tiers; None means that there is no datastore.
            draft_calibration: Corrections of the draft model's claims, shared by all sessions.
            counts: Counts of all sessions.
            num_at_once: Fewest forwards that the draft model makes of a path at a time.
            times: Those of both models, shared by all sessions.
        """
        self.spec = spec
        is_sampled = decides_by_ratio(spec.sampling, spec.speculation)
        self._noise = DraftNoise(spec.sampling.seed) if is_sampled else None
        # Without shared noise the draft model ranks by its own probabilities. The ratio rule is exact only without it.
        shares_noise = spec.speculation.shared_noise and not is_sampled
        self.ranking = spec.sampling if shares_noise else replace(spec.sampling, temperature=0.0)
        self.has_raw_scores = not spec.speculation.calibration
        """True if candidates are scored by the draft model's own probabilities."""
        self.tree = DraftTree(spec.committed_token_ids, spec.vocab_size)
        self._adjustments = TextAdjustments(spec.sampling, self.tree, spec.num_prompt_tokens)
        self._structured: StructuredText | None = None
        if spec.matcher is not None:
            output = spec.committed_token_ids[spec.num_prompt_tokens :]
            self._structured = StructuredText(spec.matcher, self.tree, output)
        self._asks_more = (
            is_sampled or self._structured is not None or self.has_raw_scores or spec.sampling.has_adjustments
        )
        """True if the session must handle each forward's result before the next forward."""
        self._num_at_once = 1 if self._asks_more else num_at_once
        self.cache = cache
        self._slots = Slots(cache, self.tree)
        self._outbox = Outbox(self.tree, has_rows=spec.speculation.is_ratio)
        self.commit_number = 0
        """Number of its latest commit, by the engine's count. Before its first commit: the engine's latest when it was
        opened."""
        self.has_begun = False
        """True once it has had room in the pool."""
        self._is_shared = False
        self._counts = counts or DraftCounts()
        self._policy: GrowthPolicy | None = None if spec.begins_paused else growth_policy(spec.speculation)
        self._has_ended = False
        """True if the draft is not worth going on with before the next commit."""
        self._num_forwards = 0
        """Forwards since the last commit."""
        self._acceptance_rate = AcceptanceRate()
        self._times = times or PairTimes()
        self._set_turns(spec.speculation)
        calibration_of_claims = None if self.has_raw_scores else draft_calibration or DraftCalibration()
        self._claims = PendingClaims(calibration_of_claims, self.ranking.is_greedy)
        self._next_expansion: Expansion | None = None
        self._has_changed = True
        """True if `_next_expansion` is out of date: the tree or the parameters have changed since."""
        self._tokens_per_round = RunningMean()
        self._tokens_of_hit = RunningMean()
        """Tokens of the rounds that need not wait."""
        self._follows_hit = False
        """True if the latest commit left sent nodes to verify: this round need not wait."""
        self._forward_us, self._round_trip_us = self._times.target_us, 0
        self._max_num_nodes = 0
        """Most nodes that a round of the target can verify. 0 means not known."""
        self._max_context_len = max_context_len
        self._phrases = Phrases(
            self.tree, spec.num_prompt_tokens, self.ranking, calibration or RetrievalCalibration(), tiers
        )
        self._phrases.use(draft_plan(spec.speculation))
        self._foresee()

    def _set_turns(self, params: SpeculationParams) -> None:
        """Sets the flags on waiting that follow from the parameters."""
        waiting = params.method.waits(params)
        self._is_awaited = waiting.is_certain
        """True if the target waits for drafts: no commit comes while one grows."""
        self.takes_turns = waiting is Waiting.IN_TURNS
        """True if nothing is drafted while the target works."""
        self._max_chain_len = params.num_speculative_tokens
        self._is_calibrated = params.calibration
        self.is_weighed = self.takes_turns and params.calibration
        """True if a draft ends where another forward is not worth the target's time."""

    @property
    def known_token_ids(self) -> Sequence[TokenId]:
        """Committed tokens, see `outrider.models.residency.Resident`."""
        return self.tree.committed

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache."""
        return self._slots.num_missing

    @property
    def is_waited_for(self) -> bool:
        """True if the target has none of this session's nodes to verify, or waits for drafts in any case."""
        return self.takes_turns or not self._outbox.has_sent

    @property
    def is_prefilling(self) -> bool:
        """True while more of the prompt is missing in the cache than goes into a forward with nodes of the tree."""
        return self.num_missing > MIN_PREFILL_ROWS

    def share_prefix(self) -> None:
        """Publishes what this session has read of its text, when it grows for the first time."""
        if not self._is_shared:
            self._is_shared = True
            self.cache.publish(self.known_token_ids)

    def enter(self) -> None:
        """Takes in the part of its prefix that was found in the pool, now that the session has room there."""
        self._slots.take_prefix()
        self.has_begun = True

    @property
    def is_paused(self) -> bool:
        """True if nothing shall grow until the caller steers again."""
        return self._policy is None

    def steer(self, steering: Steering) -> None:
        """Applies a steering. Nodes that were grown stay."""
        self._has_changed = True
        if steering.speculation is not None and steering.speculation.method.is_off:
            self._policy = None
        elif steering.speculation is not None:
            self._policy = growth_policy(steering.speculation)
            self._set_turns(steering.speculation)
            self._phrases.use(draft_plan(steering.speculation))
        self._forward_us = self._times.target_us = steering.forward_us or self._forward_us
        self._round_trip_us = steering.round_trip_us or self._round_trip_us
        self._max_num_nodes = steering.max_num_nodes or self._max_num_nodes
        self._outbox.budget.measure(steering.forward_us, steering.round_trip_us)
        self._foresee()

    def commit(self, token_ids: Sequence[TokenId], acknowledged_node_id: int = 0) -> None:
        """Appends committed tokens and forgets what they contradict.

        Args:
            token_ids: Tokens that follow the committed ones.
            acknowledged_node_id: Latest node that the target had by then; 0 means that it does not say.
        """
        self._has_changed = True
        self._num_forwards, self._has_ended = 0, False
        self._outbox.budget.begin_round(acknowledged_node_id)
        # Before the tree is re-rooted: both walk down from the old root.
        self._claims.judge(self.tree, token_ids)
        self._phrases.commit(token_ids)
        if self._structured is not None:
            self._structured.take(token_ids)
        num_nodes = self.tree.num_nodes
        self._judge_first_guesses(token_ids)
        num_known = self.tree.commit(token_ids)
        self._counts.num_committed += num_known
        self._counts.num_wasted += num_nodes - num_known - self.tree.num_nodes
        self._claims.forget()
        self._slots.commit()
        self._outbox.commit()
        self._tokens_per_round.add(len(token_ids))
        if self._follows_hit:
            self._tokens_of_hit.add(len(token_ids))
        self._follows_hit = self._outbox.has_sent
        if self._policy is not None:
            self._policy.committed(self.tree, len(token_ids), num_known)
            for parent, candidate in self._policy.known_children(self.tree):
                self._add(parent, candidate)
            self._foresee()

    def _foresee(self) -> None:
        """Tells the policy what the times of both sides say."""
        if self._policy is not None:
            rounds = self._round_trip_us / max(1, self._forward_us + self._round_trip_us)
            self._policy.foresee(self._tokens_per_round.get(1.0) * rounds, self._least_awaited())

    def _judge_first_guesses(self, token_ids: Sequence[TokenId]) -> None:
        """Counts how many of these tokens are the first guess of the node before them."""
        node = self.tree.root
        for token_id in token_ids:
            if not node.children:
                return
            is_first = token_id == next(iter(node.children))
            self._acceptance_rate.add(int(is_first), is_refused=not is_first)
            if token_id not in node.children:
                return
            node = node.children[token_id]

    def _least_awaited(self) -> float:
        """Returns the least probability of a path after which another token is worth waiting for; see
        `outrider.core.departure`. 0 means that a whole chain is worth it. It is 0 without calibration, as in the
        papers; where all drafts are waited for; and until times are known. Only the first session has rounds without
        known times: later ones begin with the times that it was told."""
        draft_us = self._times.draft_us.value
        if not self._is_calibrated or self.takes_turns or not self._forward_us or not draft_us:
            return 0.0
        share, rate = draft_us / self._forward_us, self._acceptance_rate.value
        num_tokens = self._tokens_of_hit.get(tokens_of_hit(share, rate, self._max_chain_len))
        return least_awaited(num_tokens, share, rate)

    # What grows next, and its rows in the packed forward.

    def next_expansion(self) -> Expansion | None:
        """Returns what the policy grows next. None means nothing until the next commit, or a full context."""
        # Asked several times between two changes.
        if self._has_changed:
            self._has_changed, self._next_expansion = False, self._find_next_expansion()
        return self._next_expansion

    def _find_next_expansion(self) -> Expansion | None:
        expansion = None if self._policy is None or self._has_ended else self._policy.next_expansion(self.tree)
        if expansion is None:
            return None
        end = self._max_context_len - 1
        if self.takes_turns and self._max_num_nodes:
            # The next round cannot go further, and the one after it waits for a draft of its own.
            end = min(end, self.tree.root.position + self._max_num_nodes)
        nodes = expansion.nodes
        if any(node.position >= end for node in nodes):
            nodes = tuple(node for node in nodes if node.position < end)
            expansion = expansion._replace(nodes=nodes)
        if nodes and nodes[0].position + expansion.max_len > end:
            expansion = expansion._replace(max_len=end - nodes[0].position)
        return expansion if nodes else None

    def awaited_draft(self) -> AwaitedDraft | None:
        """Returns what the draft is worth, for a draft that the target waits for and that may end anywhere. None for
        other drafts, and while nothing was drafted since the commit: the target then waits for one forward at least."""
        if not self.is_weighed or not self._num_forwards or self._policy is None:
            return None
        expansion, num_gained = self.next_expansion(), 0.0
        if expansion is not None:
            # The mean over the forwards that are made at once.
            num_at_once = min(self._num_at_once, expansion.max_len)
            reached = sum(self._probabilities(expansion.nodes))
            num_gained = reached * self._acceptance_rate.value ** ((1 + num_at_once) / 2)
        kept = self._probabilities(list(self.tree.live_nodes()))
        if 0 < self._max_num_nodes < len(kept):
            kept = nlargest(self._max_num_nodes, kept)
        return AwaitedDraft(1 + sum(kept), num_gained, self._num_forwards, self._forward_us + self._round_trip_us)

    def _probabilities(self, nodes: Sequence[Node]) -> list[float]:
        """Returns for each node the probability that the target keeps it."""
        if self._noise is None:
            return path_probabilities(nodes, self.tree.root)
        # When a sample is sent must not depend on its value.
        return [self._acceptance_rate.value ** (node.position - self.tree.root.position) for node in nodes]

    def end_draft(self) -> None:
        """Ends the draft: nothing grows before the next commit."""
        self._has_ended = self._has_changed = True

    def with_phrase(self, expansion: Expansion) -> Expansion:
        """Adds a retrieved phrase to an expansion of the end of a chain. Returns any other expansion unchanged."""
        tip = expansion.nodes[0]
        if expansion.num_children != 1 or not self._slots.is_chain(expansion.nodes):
            return expansion
        if self._noise is not None and self._policy is not None and not self._policy.is_message(self.tree, 1):
            # A phrase makes a draft faster where samples agree with it, and the values of samples must not decide when
            # they are sent.
            return expansion
        phrase = self._phrases.behind(tip, min(expansion.max_len - 1, self._max_context_len - tip.position - 2))
        return expansion._replace(phrase=phrase) if phrase else expansion

    def loop_room(self, expansion: Expansion) -> int:
        """Returns how many forwards, from an expansion on, can run without the session in between. It is 0 unless what
        follows is a path on which every token is the draft model's best one, whatever siblings these have."""
        if self._asks_more or self._phrases.is_used or len(expansion.nodes) != 1:
            return 0
        return expansion.max_len if self._is_awaited else min(expansion.max_len, MAX_STEPS_AHEAD)

    def followed(self, expansion: Expansion, token_id: TokenId) -> Expansion | None:
        """Returns what grows after an expansion if that is this token alone, and counts the token's row as run;
        otherwise None. The token has been through a forward already, in the slot after those in the cache."""
        following = self.next_expansion()
        if following is None or not self.loop_room(following):
            return None
        node = following.nodes[0]
        if (
            node.parent is not expansion.nodes[0]
            or node.token_id != token_id
            or not self._slots.is_chain(following.nodes)
        ):
            return None
        self._slots.append(node)
        return following

    def segment(self, expansion: Expansion, max_rows: int) -> Segment:
        """Returns the rows of an expansion, with logits in the order of its nodes. While more than `max_rows` tokens of
        the trunk are missing, returns a piece of the trunk instead, without logits."""
        return self._slots.segment(expansion, max_rows)

    def output_indices(self, expansion: Expansion) -> list[int]:
        """Returns the output index of the draw that each row of an expansion's logits is for."""
        first = 1 - self.spec.num_prompt_tokens  # a row's draw is for the position after it
        indices = [node.position + first for node in expansion.nodes]
        return [*indices, *range(indices[-1] + 1, indices[-1] + 1 + len(expansion.phrase))]

    def adjustments(self, expansion: Expansion) -> list[Adjustment | None]:
        """Returns for each row of an expansion's logits how the target would adjust its own there."""
        if not self.spec.sampling.has_adjustments:
            return [None] * (len(expansion.nodes) + len(expansion.phrase))
        tip = expansion.nodes[-1]
        phrases = [expansion.phrase[:length] for length in range(1, len(expansion.phrase) + 1)]
        return [
            *map(self._adjustments.behind, expansion.nodes),
            *(self._adjustments.behind(tip, phrase) for phrase in phrases),
        ]

    def keep_to_structure(self, expansion: Expansion, logits: Logits) -> None:
        """Masks the tokens that the structure of the output forbids in an expansion's logits, in place.

        Args:
            expansion: The expansion.
            logits: float32 [rows of the expansion, vocab].
        """
        if self._structured is None or self._structured.error:
            return
        paths = [path_to(node, self.tree.root) for node in expansion.nodes]
        paths += [[*paths[-1], *expansion.phrase[: length + 1]] for length in range(len(expansion.phrase))]
        try:
            for row, path in enumerate(paths):
                matcher = self._structured.behind(path)
                if matcher is not None:
                    if not matcher.is_over:
                        mask_row(logits, row, matcher)
                    matcher.rollback(len(path))
        except StructureBroken as error:
            self._structured.error = str(error)  # guesses go on without; the target tells its caller

    def draws(self, expansion: Expansion) -> Sequence[DraftDraw | None]:
        """Returns the draw for each row of an expansion's logits; None means that the row is ranked."""
        if self._noise is None:
            return [None] * (len(expansion.nodes) + len(expansion.phrase))
        words = self._noise.words(self.tree, expansion)
        policy = self._policy
        biases = [NO_BIAS if policy is None else policy.draw_bias(node) for node in expansion.nodes]
        biases += [NO_BIAS] * len(expansion.phrase)
        return [
            DraftDraw(self.spec.sampling, word, self.spec.vocab_size, *bias)
            for word, bias in zip(words, biases, strict=True)
        ]

    # What a forward found.

    def grow(self, expansion: Expansion, found: Sequence[Sequence[Candidate]], forward_us: float) -> None:
        """Adds what a forward found: the candidates of each expanded node, best first."""
        self._has_changed = True
        self._num_forwards += 1
        self._outbox.add_forward(forward_us, len(expansion.nodes) + len(expansion.phrase))
        # Even without a result: their keys and values are in the cache from here on.
        for node in expansion.nodes:
            node.is_expanded = True
        if self._policy is None:
            return  # paused while the forward ran
        if expansion.phrase:
            self._grow_phrase(expansion, found)
            return
        least = expansion.least_logprob
        corrected = [
            self._claims.corrected(self.tree, node, candidates if least == -math.inf else _likely(candidates, least))
            for node, candidates in zip(expansion.nodes, found, strict=True)
        ]
        for parent, candidate in self._policy.children(self.tree, expansion, corrected):
            self._add(parent, candidate)

    def _grow_phrase(self, expansion: Expansion, candidates: Sequence[Sequence[Candidate]]) -> None:
        """Adds the tokens of the phrase that the draft model has drawn itself, and its own next token."""
        node: Node | None = expansion.nodes[0]
        accepted: list[Node] = []
        for index, children in enumerate(candidates):
            if node is None or not children:
                break
            token_id = children[0].token_id
            node = self._add(node, self._claims.corrected(self.tree, node, children)[0])
            if node is None or index >= len(expansion.phrase) or token_id != expansion.phrase[index]:
                break
            node.is_expanded = True
            # The phrase was among the rows of the forward, so the keys and values of this token are in the cache.
            accepted.append(node)
        self._slots.keep_phrase(accepted)
        self._phrases.judge(len(accepted))
        self._outbox.add_phrase(len(accepted))

    def _add(self, parent: Node, candidate: Candidate) -> Node | None:
        before = self.tree.num_nodes
        child = self.tree.add(parent, candidate.token_id, candidate.logprob, Source.DRAFT, candidate.q)
        # `add` also returns a node that exists already, which was sent or waits for it.
        if child is not None and self.tree.num_nodes > before:
            self._outbox.add(child)
            self._counts.num_nodes += 1
        return child

    def take_message(self, *, is_idle: bool) -> Draft | None:
        """Takes the unsent nodes, or as many of the first as the send budget allows, with what they have cost.

        Args:
            is_idle: True if nothing grows now. Then nodes are sent even if the policy would rather wait for more.

        Returns:
            None if nothing should be sent now.
        """
        num_unsent = self._outbox.num_unsent
        if not num_unsent or not (is_idle or self._policy is None or self._policy.is_message(self.tree, num_unsent)):
            return None
        draft = self._outbox.take()
        return None if draft is None else draft._replace(retrieval_us=self._phrases.take_spent_us())


def _likely(candidates: Sequence[Candidate], least: float) -> list[Candidate]:
    """Returns the candidates of a node that are probable enough, and the best one in any case."""
    return [*candidates[:1], *takewhile(lambda candidate: candidate.logprob >= least, candidates[1:])]
