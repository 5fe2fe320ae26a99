"""One generation as a state machine without I/O: drafts in, chains out; the target's draws in, verdicts out.

A round is: `nodes = session.next_chain()` (or `next_subtree`), one target forward over [last committed token] + nodes,
one draw for each row, then `session.apply(nodes, draws)`. Under the match rule drafted tokens are kept as long as they
equal the target's own draws in their places; the first draw that no drafted token equals is the next token. Every
emitted token is the target's draw, so the text is a function of (prompt, parameters, seed) alone, whatever the drafts
were. Under the ratio rule the caller decides what is emitted (`outrider.core.acceptance`), and `apply` takes that for
the draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, Protocol

from outrider.core.acceptance import decides_by_ratio
from outrider.core.noise import row_key
from outrider.core.params import SamplingParams, Source
from outrider.core.reports import ReportParams, RoundReport, TokenLogprobs
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.statistics import Counts, Statistics
from outrider.core.structure import Matcher, Structure, StructuredText
from outrider.core.tree import DraftTree, Node, TokenId


class FinishReason(Enum):
    """The reason why a generation ended. The values are those of the wire."""

    LENGTH = 1
    STOP = 2


class Verdict(NamedTuple):
    """The decision of one round."""

    # A tuple, like everything that is made once per session and round: a frozen dataclass takes four times as long to
    # make.

    num_drafted: int
    """Drafted tokens that were verified."""
    num_accepted: int
    """Drafted tokens that the target accepted: a path from the root. A stop token among them, and those after it, count
    here and have their rows, but are neither committed nor in the statistics."""
    accepted_rows: tuple[int, ...]
    """Rows of the accepted tokens, the root being row 0."""
    base_len: int
    """Committed tokens before this verdict."""
    token_ids: tuple[TokenId, ...]
    """Tokens committed by it: the accepted ones and the next token, cut at the end of the generation. Empty if they
    begin with a stop token."""
    sources: tuple[Source, ...]
    """Origin of each token."""
    rejected_token_ids: tuple[TokenId, ...]
    """The most probable drafted path that begins in the place of the next token: its first token was refused. Empty if
    nothing was drafted there."""
    rejected_row: int | None
    """Row of the refused token."""
    finish_reason: FinishReason | None
    stop_token_id: TokenId | None
    """The token that ended the generation, if one did."""
    stop_string: str | None = None
    """The string that ended it, if one did."""
    text: str | None = None
    """Text that these tokens decide, cut at a stop string. None if there are no stop strings to look for: then the
    tokens are decoded where they are sent."""
    last_text: str = ""
    """Text that was held back for further tokens, once the generation has ended; only if `text` is set."""
    text_ends: tuple[int, ...] = ()
    """Ends of the tokens' texts, as in `Chunk.text_ends`, if the request asks for them and `text` is set."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the tokens, in parallel, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt from its second token on, in the first verdict."""
    report: RoundReport | None = None
    """The work of the round, if the request asks for it."""


class Ending(Protocol):
    """Ends a generation by its content: a stop string, or a complete grammar."""

    def take(self, token_ids: Sequence[TokenId]) -> int | None:
        """Takes in the next output tokens, without stop tokens.

        Returns:
            How many of them belong to the output if it ends with them: at least 1. None means that it goes on.
        """


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The resolved request of a generation. All values are valid."""

    session_id: str
    prompt_token_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    vocab_size: int
    """Token ids are below it."""
    max_tokens: int
    """Most output tokens, those of resume_token_ids included; the context has room for them. With as many resumed
    tokens nothing is left to generate: see `ending_of`."""
    stop_token_ids: frozenset[TokenId] = frozenset()
    """Tokens that end the generation, end-of-sequence tokens included."""
    resume_token_ids: tuple[TokenId, ...] = ()
    """Output that an earlier, interrupted generation has already emitted."""
    requested_method: Method | None = None
    """The method that was asked for, if that of `speculation` replaces it."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation."""
    includes_stop: bool = False
    """True if the stop string stays at the end of the text."""
    is_complete: bool = False
    """True if the resumed tokens are a whole output already, by a stop string or the structure. Nothing is left to
    generate then."""
    resumed_stop: str | None = None
    """The stop string that the resumed tokens end with, if they do."""
    report: ReportParams = field(default_factory=ReportParams)
    structure: Structure | None = None
    """Description of the allowed outputs."""
    matcher: Matcher | None = field(default=None, compare=False)
    """Matcher of the structure, at its beginning. Set if, and only if, `structure` is."""
    prediction_token_ids: tuple[TokenId, ...] = ()
    """A text that the output will probably repeat parts of; empty means none. Only if `target_plan` looks anything up
    in process."""
    shares_gpu: bool = False
    """True if its draft model runs on the target's GPU: each then slows the other down."""
    skip_special_tokens: bool = True
    """True if the text has no special tokens; the tokens are the same."""

    @property
    def largest_token_id(self) -> TokenId:
        """Largest token id that the request names."""
        sampling = self.sampling
        named = chain(
            self.prompt_token_ids,
            self.resume_token_ids,
            sampling.stop_token_ids,
            (token_id for token_id, _ in sampling.logit_bias),
            *sampling.bad_words_token_ids,
        )
        return max(named)


def ending_of(spec: SessionSpec) -> Verdict | None:
    """Returns the last verdict of a generation whose resumed tokens are all that it may emit, or None if it goes on."""
    num_resumed = len(spec.resume_token_ids)
    if num_resumed < spec.max_tokens and not spec.is_complete:
        return None
    return Verdict(
        num_drafted=0,
        num_accepted=0,
        accepted_rows=(),
        base_len=len(spec.prompt_token_ids) + num_resumed,
        token_ids=(),
        sources=(),
        rejected_token_ids=(),
        rejected_row=None,
        finish_reason=FinishReason.STOP if spec.is_complete else FinishReason.LENGTH,
        stop_token_id=None,
        stop_string=spec.resumed_stop,
    )


class Session:
    """Runs one generation as a state machine. The caller owns the model, the clock and the streams."""

    def __init__(self, spec: SessionSpec, totals: Counts | None = None, ending: Ending | None = None) -> None:
        """
        Args:
            spec: The request.
            totals: Counts of the process; those of this generation are added to them. None means that there are none.
            ending: A further end besides stop tokens, its structure and its length.
        """
        self.spec = spec
        self.tree = DraftTree(spec.prompt_token_ids + spec.resume_token_ids, spec.vocab_size)
        self.structured: StructuredText | None = None
        """Holds the output to its structure, if it must have one."""
        if spec.matcher is not None:
            self.structured = StructuredText(spec.matcher, self.tree, spec.resume_token_ids)
        self._endings = [each for each in (self.structured, ending) if each is not None]
        self.is_as_drawn = self.structured is None and not spec.sampling.has_adjustments
        """True if a token influences the next draw only through the row that it is drawn from. Without drafts, the next
        round can then go on from this round's token before the host has seen it."""
        self.committed: Sequence[TokenId] = self.tree.committed
        """Prompt and output so far. Append-only."""
        self._num_prompt_tokens = len(spec.prompt_token_ids)
        self.statistics = Statistics(totals=totals)
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: TokenId | None = None
        self.decides_by_ratio = decides_by_ratio(spec.sampling, spec.speculation)
        """True if the draws that `apply` takes come from the ratio rule (`outrider.core.acceptance`)."""

    @property
    def may_cut_text(self) -> bool:
        """True if a round may commit fewer tokens than it has drawn, because a structure or a stop string ends the
        text."""
        return bool(self._endings)

    @property
    def num_output_tokens(self) -> int:
        """Length of the output so far; the output index of the next token."""
        return len(self.committed) - self._num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Tokens that may still be emitted."""
        return self.spec.max_tokens - (len(self.committed) - self._num_prompt_tokens)

    @property
    def max_chain_len(self) -> int:
        """Longest chain of the next round: at most the tokens that can still be emitted besides the next token."""
        return min(self.spec.speculation.num_speculative_tokens, self.num_wanted - 1)

    def next_chain(self) -> list[Node]:
        """Returns the chain for the next round, possibly empty."""
        return self.tree.best_chain(
            self.max_chain_len, self.spec.speculation.min_path_logprob, is_sampled=self.decides_by_ratio
        )

    def next_subtree(self, max_num_nodes: int) -> list[Node]:
        """Returns the sub-tree for the next round, possibly empty: parents before children, the most probable first."""
        return self.tree.best_subtree(max_num_nodes, self.max_chain_len)

    def add_random_chain(self) -> None:
        """Adds a chain of random tokens, to measure the cost of verifying drafts (the fast backup of SAGUARO)."""
        node: Node | None = self.tree.root
        for _ in range(self.max_chain_len):
            if node is not None:
                # Any hash that is independent of the seed's noise will do.
                token_id = row_key(0, node.position)[0] % self.spec.vocab_size
                node = self.tree.add(node, token_id, -math.log(self.spec.vocab_size), Source.RANDOM)

    def apply(self, nodes: Sequence[Node], draws: Sequence[TokenId]) -> Verdict:
        """Takes the target's draws, one for each row of [last committed token] + nodes, and commits the tokens that
        they decide.

        `nodes` are a chain or a connected sub-tree of the mirror, parents before children. There is one draw for each
        row: from the root down, the child that equals the draw is accepted, and its own draw counts next; the first
        draw that no child equals is the next token. Draws of rows that are never reached may be missing.
        """
        rows = {node: row for row, node in enumerate(nodes, start=1)} if nodes else {}
        path, next_token_id = self._accepted(rows, draws) if nodes else ([], draws[0])
        num_accepted = len(path)
        # Before the commit, which removes the nodes' parents.
        refused = _path_below(path[-1] if path else self.tree.root, nodes) if nodes else []
        token_ids = [*[accepted.token_id for accepted in path], next_token_id]
        sources = [*[accepted.source for accepted in path], Source.TARGET]
        reason, stop_token_id, stop_token_ids = None, None, self.spec.stop_token_ids
        for index, token_id in enumerate(token_ids):
            if token_id in stop_token_ids:
                reason, stop_token_id = FinishReason.STOP, token_id
                # A stop token is not part of the output, nor are the tokens that were accepted after it.
                del token_ids[index:], sources[index:]
                break
        for ending in self._endings:
            num_kept = ending.take(token_ids) if token_ids else None
            if num_kept is not None:
                # It comes before a stop token that follows, and before the greatest length.
                reason, stop_token_id = FinishReason.STOP, None
                del token_ids[num_kept:], sources[num_kept:]
        if reason is None and len(token_ids) >= self.num_wanted:  # never more: the chain left room for the next token
            reason = FinishReason.LENGTH
        base_len = len(self.committed)
        num_known = self.tree.commit(token_ids)
        is_hit = num_known == num_accepted + 1
        # For a hit the next token, too, must be a known node. After a stop token it is not committed, so there is no
        # hit.
        self.statistics.count_round(
            len(nodes), [source for source in sources if source is not Source.TARGET] if path else (), is_hit
        )
        if is_hit and self.tree.root.children:
            self.statistics.add(num_ready_hits=1)
        self.finish_reason, self.stop_token_id = reason, stop_token_id
        return Verdict(
            num_drafted=len(nodes),
            num_accepted=num_accepted,
            accepted_rows=tuple([rows[accepted] for accepted in path]) if path else (),
            base_len=base_len,
            token_ids=tuple(token_ids),
            sources=tuple(sources),
            rejected_token_ids=tuple([each.token_id for each in refused]) if refused else (),
            rejected_row=rows[refused[0]] if refused else None,
            finish_reason=reason,
            stop_token_id=stop_token_id,
        )

    def _accepted(self, rows: Mapping[Node, int], draws: Sequence[TokenId]) -> tuple[list[Node], TokenId]:
        """Returns the path that the draws follow down from the root, and the draw after it."""
        path: list[Node] = []
        node, row = self.tree.root, 0
        while True:
            child = node.children.get(draws[row])
            # The mirror may have grown since the forward began: a node that came later has no row, and so no draw. A
            # node after the end of a structure has no draw either: the drawing side has seen that end.
            if child is None or rows.get(child, len(draws)) >= len(draws):
                return path, draws[row]
            path.append(child)
            node, row = child, rows[child]


def _path_below(node: Node, nodes: Sequence[Node]) -> list[Node]:
    """Returns the path below a node that always takes the first child in the order of `nodes`, parents first."""
    path: list[Node] = []
    tip = node
    for other in nodes:
        if other.parent is tip:
            path.append(other)
            tip = other
    return path
