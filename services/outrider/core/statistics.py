"""Statistics of the speculation: counts of a generation and of a process, and the time of rounds by its parts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import dropwhile
from statistics import median
from typing import NamedTuple

from outrider.core.auto.strategies import Decision
from outrider.core.params import Source


class RoundTime(NamedTuple):
    """One round, in milliseconds."""

    round_ms: float
    """Time from one commit to the next."""
    forward_ms: float
    """The target's forward."""
    wait_ms: float
    """Waiting for a draft."""
    retrieval_ms: float = 0.0
    """Retrieval in process, learning from the commit included; a part of the overhead."""

    @property
    def overhead_ms(self) -> float:
        """All the rest: tree, sampler, packing, streams."""
        # The parts are measured separately, and may add up to a little more than the whole.
        return max(0.0, self.round_ms - self.forward_ms - self.wait_ms)


@dataclass(frozen=True, slots=True)
class DraftTime:
    """The time of drafts, in milliseconds: of the first draft after a commit that left nothing to verify (in turns,
    after any commit), or of all drafts since the round before."""

    draft_latency_ms: float
    """Time from a commit to the first draft that answered it."""
    draft_forward_ms: float
    """Time of the draft model's forwards for them."""
    draft_retrieval_ms: float
    """Time that the drafter spent on retrieval, besides its forwards."""


class Peer(Enum):
    """Everything besides the target that a generation needs. The values are those of the wire."""

    SPECULATOR = 1
    DATASTORE = 2
    EDGE = 3
    """The draft model of the caller of Collaborate."""


class Absence(Enum):
    """Reasons for which a peer is missing. The values are those of the wire."""

    STARTING = 1
    """It answers, but does not serve yet, or no longer serves."""
    UNREACHABLE = 2
    """It could not be reached when it was needed first."""
    LOST = 3
    """It was there, and the stream to it broke."""
    SLOW = 4
    """Its answers come after the wait has ended."""
    FULL = 5
    """It has the most sessions that it takes."""
    UNUSABLE = 6
    """It refuses, sends invalid messages, or its model does not fit."""


class MissingPeers:
    """Counts the rounds of a generation without a peer that its method needs."""

    def __init__(self) -> None:
        self.num_rounds: Counter[tuple[Peer, Absence]] = Counter()
        """Rounds by the peer and the reason. A peer that was missing only between two rounds has 0."""
        self._absent: dict[Peer, Absence] = {}

    def miss(self, peer: Peer, absence: Absence) -> None:
        """Marks a peer as missing from now on."""
        self._absent[peer] = absence
        self.num_rounds[peer, absence] += 0  # listed, even if it is back before a round ends

    def find(self, peer: Peer) -> None:
        """Marks a peer as present from now on. It need not have been missing."""
        self._absent.pop(peer, None)

    def end_round(self) -> None:
        """Counts a round for each peer that is missing now."""
        if self._absent:
            self.num_rounds.update(self._absent.items())


@dataclass(slots=True)
class Traffic:
    """Counts the bytes of the messages between a target and its drafter in one generation, without the frames of HTTP/2
    around them. Its owner writes, others read."""

    num_bytes_sent: int = 0
    """Bytes sent to the drafter."""
    num_bytes_received: int = 0
    """Bytes received from the drafter."""


@dataclass(frozen=True, slots=True)
class CountInfo:
    """The description of a count. Everything that shows the count is derived from it.

    A new count of the speculation summary needs a field of `SpeculationSummary`, a field of `Counts` with that name,
    and the line that adds to it. The summary copies it by its name, spans carry it as `outrider.<name>`, and this
    description decides the rest.
    """

    description: str
    """The help text of the metric."""
    metric: str = ""
    """Name of the Prometheus counter, its unit included. Empty means not exported as a metric of its own."""
    phrase: str = ""
    """Words of the line that sums a generation up for people, with {} for the number. Empty means not shown."""
    is_trouble: bool = False
    """True if the phrase belongs to the line about a degraded generation, which has it only if the count is not 0."""


def count(description: str, *, metric: str = "", phrase: str = "", is_trouble: bool = False) -> int:
    """Declares a field of `Counts`. See `CountInfo` for the arguments."""
    info = CountInfo(description, metric, phrase, is_trouble)
    return field(default=0, metadata={CountInfo: info})


@dataclass(slots=True)
class Counts:
    """The counts of one generation, or the totals of a process.

    Its owner writes; other threads may read, and see numbers of about the same time.
    """

    num_rounds: int = count("Target forwards that verified or decoded.", phrase="{} rounds")
    num_drafted_tokens: int = count(
        "Drafted tokens that were verified.", metric="outrider_spec_decode_num_draft_tokens_total"
    )
    num_accepted_tokens: int = count(
        "Drafted tokens that were accepted.", metric="outrider_spec_decode_num_accepted_tokens_total"
    )
    num_empty_rounds: int = count("Rounds that verified nothing.")
    num_hits: int = count(
        "Rounds after which the tree had the committed next token.", metric="outrider_hit_rounds_total"
    )
    num_tail_tokens: int = count(
        "Retrieved tokens that were kept behind drafted ones, in the same round.", metric="outrider_tail_tokens_total"
    )
    num_draft_forwards: int = count(
        "Forwards of the draft model whose nodes have arrived.", metric="outrider_arrived_draft_forwards_total"
    )
    num_phrase_tokens: int = count(
        "Retrieved tokens that these forwards have kept.", metric="outrider_arrived_phrase_tokens_total"
    )
    num_draft_rows: int = count("Rows of these forwards, those that only read the text aside.")
    num_withheld_nodes: int = count("Nodes that the drafter held back for a time to spare the line.")
    num_ready_hits: int = count("Hits behind which more was drafted already.", metric="outrider_ready_hit_rounds_total")
    num_speculator_losses: int = count(
        "Times that a session lost its drafter: the speculator's stream, or the drafts of its caller.",
        metric="outrider_speculator_losses_total",
        phrase="the speculator was lost {} times",
        is_trouble=True,
    )
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    rounds_by_num_accepted: Counter[int] = field(default_factory=Counter)
    """Rounds that verified drafted tokens, by the number of kept tokens."""
    totals: Counts | None = None
    """The totals that these counts are a part of: amounts are added to both. None means that there are none."""

    def add(self, **amounts: int) -> None:
        """Adds to counts by their names. Raises AttributeError for an unknown name."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
        if self.totals is not None:
            self.totals.add(**amounts)

    def count_round(self, num_drafted: int, accepted_sources: Sequence[Source], is_hit: bool) -> None:
        """Counts a verdict.

        Args:
            num_drafted: Drafted tokens that were verified.
            accepted_sources: Origins of the kept ones.
            is_hit: True if the tree had the committed next token as a node.
        """
        if not num_drafted:
            # The fast path, for most rounds of a machine with many sessions: there is nothing else to count.
            counts: Counts | None = self
            while counts is not None:
                counts.num_rounds += 1
                counts.num_empty_rounds += 1
                counts.num_hits += is_hit
                counts = counts.totals
            return
        behind_draft = dropwhile(lambda source: source is not Source.DRAFT, accepted_sources)
        self.add(
            num_rounds=1,
            num_drafted_tokens=num_drafted,
            num_accepted_tokens=len(accepted_sources),
            num_hits=is_hit,
            num_tail_tokens=sum(source is not Source.DRAFT for source in behind_draft),
        )
        self.rounds_by_num_accepted[len(accepted_sources)] += 1
        # Counter.update adds to what is there, unlike dict.update.
        self.accepted_by_source.update(accepted_sources)
        if self.totals is not None:
            self.totals.accepted_by_source.update(accepted_sources)


COUNTS: Mapping[str, CountInfo] = {
    each.name: each.metadata[CountInfo] for each in fields(Counts) if CountInfo in each.metadata
}
"""The counts by their names, which are those of `SpeculationSummary` in the proto."""


@dataclass(slots=True)
class Statistics(Counts):
    """All statistics of the speculation in one generation. Its owner writes, others read."""

    missing: MissingPeers = field(default_factory=MissingPeers)
    """Peers that the method needs and that were not there."""
    round_times: list[RoundTime] = field(default_factory=list)
    draft_times: list[DraftTime] = field(default_factory=list)
    """Times of the drafts that were waited for, as far as they are known."""
    decisions: Sequence[Decision] = ()
    """Strategies that `auto` has used."""

    @property
    def degraded(self) -> bool:
        """True if a peer that the method needs was missing for part of the generation."""
        return bool(self.missing.num_rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per round, the next token included."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 0.0


def median_or_zero(values: Sequence[float]) -> float:
    """Returns the median, or 0 without values."""
    return median(values) if values else 0.0


class RunningMean:
    """An exponentially weighted mean that starts at its first value. Unset until then."""

    __slots__ = ("_weight", "value")

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Takes a value in."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)

    def get(self, default: float) -> float:
        """Returns the mean, or `default` before the first value."""
        return default if self.value is None else self.value


class Histogram:
    """Observations by size. One thread adds; others may read, and see numbers of about the same time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are upper bounds, ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations between each bound and the one before; the last number is of observations beyond all bounds."""
        self.total = 0.0
        """Sum of all observations."""

    def add(self, value: float, count: int = 1) -> None:
        """Takes in `count` observations of the same size."""
        # bisect_left: a value that equals a bound counts below it, as `le` of Prometheus wants.
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_observations(self) -> int:
        """Number of observations."""
        return sum(self.counts)
