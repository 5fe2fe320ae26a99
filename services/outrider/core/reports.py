"""Reports of a generation beside its text, where the request asks for them: log-probabilities, and its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from outrider.core.params import Source, check
from outrider.core.speculation import Method
from outrider.core.statistics import DraftTime, RoundTime
from outrider.core.tree import Node, TokenId

MAX_LOGPROBS = 20
"""Most tokens beside a token whose log-probabilities are told."""


class LogprobsMode(Enum):
    """The numbers that are told for log-probabilities. The values are those of the wire, the names vLLM's."""

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
        """True if the numbers are those after all that a request asks for."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def raw(self) -> LogprobsMode:
        """The same of the model's own distribution."""
        return LogprobsMode.RAW_LOGPROBS if self.is_normalised else LogprobsMode.RAW_LOGITS

    @property
    def is_normalised(self) -> bool:
        """True if the numbers are log-probabilities, not logits."""
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)


@dataclass(frozen=True, slots=True)
class ReportParams:
    """Parameters of the reports. The text does not depend on them."""

    logprobs: int | None = None
    """Most probable tokens whose log-probabilities are told beside each output token's own. None means not even its
    own."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    echo: bool = False
    """Tells the prompt as the target reads it."""
    rounds: bool = False
    """Tells what each round did."""
    text_ends: bool = False
    """Tells where the text of each token ends."""
    trees: bool = False
    """Tells which drafted tokens each round verified, beside what it did."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= MAX_LOGPROBS, f"report.{name}", f"in [0, {MAX_LOGPROBS}]", value)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, or its logit (`LogprobsMode`), and those of the most probable ones there."""

    logprob: float
    rank: int
    """Number of tokens that were more probable, and 1."""
    top: tuple[tuple[int, float], ...]
    """Token ids and their numbers, the most probable first."""


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """The drafted tokens of one round, parents before children. The lists run in parallel."""

    parents: tuple[int, ...]
    """Place of each one's parent in these lists. -1 is the last token committed before the round."""
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each after its parent, as whoever drafted it had it."""
    sources: tuple[Source, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> VerifiedTree:
        """Returns what nodes of a draft tree say. They are a chain or a connected sub-tree below the root."""
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
    """The way in which it was drafted."""
    drafted_by_source: Mapping[Source, int]
    """Drafted tokens that were verified."""
    num_accepted: int
    """Those of them that were kept."""
    num_forward_rows: int
    """Rows of the target's forward, those of other sessions included."""
    times: RoundTime
    draft_time: DraftTime
    """The drafts that came since the round before: see `outrider.verifier.reports.RoundDrafts`."""
    tree: VerifiedTree | None = None
    """The drafted tokens that were verified, where the request asks for them."""
