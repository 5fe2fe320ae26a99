"""Reports of a generation next to its text, if the request asks for them: log-probabilities, and its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.params import Source, check
from outrider.core.speculation import Method
from outrider.core.statistics import DraftTime, RoundTime
from outrider.core.tree import Node, TokenId

MAX_LOGPROBS = 20
"""Most tokens that are reported next to an output token, with their log-probabilities."""


class LogprobsMode(Enum):
    """The numbers that are reported as log-probabilities. The values are those of the wire, the names vLLM's."""

    RAW_LOGPROBS = 1
    """Log-probabilities of the model's own distribution: before temperature, penalties, bias and filters."""
    RAW_LOGITS = 2
    """The model's own logits."""
    PROCESSED_LOGPROBS = 3
    """Log-probabilities of the distribution that tokens are drawn from."""
    PROCESSED_LOGITS = 4
    """The logits of that distribution."""

    @property
    def is_processed(self) -> bool:
        """True if the numbers are those after the request's bias, penalties, temperature and filters."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def raw(self) -> LogprobsMode:
        """The same kind of number of the model's own distribution."""
        return LogprobsMode.RAW_LOGPROBS if self.is_normalised else LogprobsMode.RAW_LOGITS

    @property
    def is_normalised(self) -> bool:
        """True if the numbers are log-probabilities, not logits."""
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)


@dataclass(frozen=True, slots=True)
class ReportParams:
    """Parameters of the reports. The text does not depend on them."""

    logprobs: int | None = None
    """Number of most probable tokens that are reported next to each output token, with log-probabilities. None means
    that not even the output token's own is reported."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    echo: bool = False
    """True if the prompt is reported as the target reads it."""
    rounds: bool = False
    """True if each round is reported (`RoundReport`)."""
    text_ends: bool = False
    """True if the end of each token's text is reported."""
    trees: bool = False
    """True if the reports of rounds also have the drafted tokens that they verified."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= MAX_LOGPROBS, f"report.{name}", f"in [0, {MAX_LOGPROBS}]", value)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, or its logit (`LogprobsMode`), and those of the most probable tokens in its
    place."""

    logprob: float
    rank: int
    """Rank of the token, from 1: the number of more probable tokens, plus 1."""
    top: tuple[tuple[int, float], ...]
    """Token ids and their numbers, the most probable first."""


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The drafted tokens of one round, parents before children. The lists run in parallel."""

    parents: tuple[int, ...]
    """Index of each token's parent in these lists. -1 is the last token committed before the round."""
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token after its parent, by its drafter."""
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> VerifiedTree:
        """Returns the description of nodes of a draft tree: a chain or a connected sub-tree below the root."""
        places = {node: place for place, node in enumerate(nodes)}
        return cls(
            parents=tuple(-1 if node.parent is None else places.get(node.parent, -1) for node in nodes),
            token_ids=tuple(node.token_id for node in nodes),
            logprobs=tuple(node.logprob for node in nodes),
            sources=tuple(node.source for node in nodes),
        )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The work of one round."""

    method: Method
    """The method that drafted."""
    drafted_by_source: Mapping[Source, int]
    """Drafted tokens that were verified."""
    num_accepted: int
    """Number of them that were kept."""
    num_forward_rows: int
    """Rows of the target's forward, those of other sessions included."""
    times: RoundTime
    draft_time: DraftTime
    """The drafts that came since the round before: see `outrider.verifier.reports.RoundDrafts`."""
    tree: VerifiedTree | None = None
    """The drafted tokens that were verified, where the request asks for them."""
