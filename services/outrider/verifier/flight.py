"""The forwards that sessions share: the rows of one, and what the device was asked for and the host has not read yet.

A *batch* is planned; a *flight* is a batch that the device runs. On an asynchronous device, the batch after a flight
may be launched before the host knows what the flight draws: a row whose token is still to be drawn has a *placeholder*
for it (`outrider.models.packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.costs import Contexts
from outrider.core.reports import TokenLogprobs
from outrider.core.retrieval.ngrams import Follower
from outrider.core.retrieval.recycling import NUM_NEXT
from outrider.models.acceptance import PendingRounds, Round
from outrider.models.draws import DrawnTokens
from outrider.models.logprobs import begin_drawn_logprobs, without_prompts
from outrider.models.packing import Segment, TokensOnDevice
from outrider.models.sampling import Logits, begin_most_probable
from outrider.models.timing import Timing
from outrider.verifier.session import VerifySession

Isolated = Callable[[str], AbstractContextManager[object]]
"""Makes a context that ends the session of this id if its body raises: see `EngineThread.isolated`."""


class Batch(NamedTuple):
    """Describes a forward: its rows, and what is drawn from them."""

    work: Sequence[VerifySession]
    segments: Sequence[Segment]
    """Rows of each session. Token ids below 0 are placeholders for tokens of `drawn`."""
    drawing: Sequence[VerifySession]
    """The sessions that get a verdict."""
    rounds: Sequence[Round]
    """For each of these, how its tokens are drawn."""
    started: float
    """Time at which it was planned."""
    drawn: TokensOnDevice | None = None
    """Whole numbers: the tokens that placeholders stand for, which the device has or still computes. None: there are
    none."""

    @property
    def num_rows(self) -> int:
        """Rows of all sessions."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def is_decoding(self) -> bool:
        """False for a forward with a piece of a prompt in it, even the last piece: its duration is not that of a
        forward that only decodes."""
        # Rows without logits are those of prompts.
        is_reading = any(session.round.num_prompt_rows for session in self.work)
        return not is_reading and all(len(segment.token_ids) == segment.num_logits for segment in self.segments)


@dataclass(eq=False, slots=True)
class Flight:
    """A launched batch: a forward and the draws after it, which the device has been asked for."""

    batch: Batch
    contexts: Contexts
    logits: Logits
    """The logits that are drawn from."""
    draws: PendingRounds
    next_tokens: Callable[[], Sequence[list[Follower]]]
    """Waits for the most probable next tokens of every row: none for a row whose session does not want them, an empty
    list if no session does."""
    logprobs: Callable[[], Sequence[TokenLogprobs | None]]
    """Waits for the log-probabilities of draws: for each round that of its token, None if it is found after the
    verdict. Empty if all are."""
    timing: Timing
    launched_at: float
    """Time at which the device had been asked for everything."""
    timed_from: float
    """Time from which `timing` measures, if the device had nothing else to do then."""
    is_decoding: bool
    """See `Batch.is_decoding`."""
    void: set[VerifySession] = field(default_factory=set)
    """Sessions whose row here was fed a token that the host then overruled: the row is ignored."""
    places: Mapping[VerifySession, int] = field(init=False)
    """Indices of the sessions that are drawn for. If each has one row, they are indices of the draws too."""

    def __post_init__(self) -> None:
        self.places = {session: place for place, session in enumerate(self.batch.drawing)}


def round_of(session: VerifySession) -> Round:
    """Describes the rows of a session for the sampler: the noise of each is keyed by its output index."""
    generation, nodes = session.generation, session.round.nodes
    first = generation.num_output_tokens
    # Minus the length of the prompt: what follows position p has the output index p + 1 + offset.
    offset = first - len(generation.committed)
    indices = [first, *[node.position + 1 + offset for node in nodes]]
    chain = nodes if generation.decides_by_ratio else None
    sampling, structured = generation.spec.sampling, generation.structured
    return Round(sampling, indices, chain, session.adjustments(), nodes, structured)


def wanted_temperatures(session: VerifySession) -> list[float | None]:
    """Returns for each row of a session the temperature at which its most probable tokens are wanted; None if they are
    not."""
    temperature = session.spec.sampling.temperature
    return [temperature if session.wants_next_tokens else None] * (1 + len(session.round.nodes))


def begin_next_tokens(logits: Logits, drawing: Sequence[VerifySession]) -> Callable[[], Sequence[list[Follower]]]:
    """Tells the device to find what `Flight.next_tokens` returns."""
    if not any(session.wants_next_tokens for session in drawing):
        return tuple
    wanted = [temperature for session in drawing for temperature in wanted_temperatures(session)]
    return begin_most_probable(logits, wanted, NUM_NEXT)


def begin_logprobs(
    logits: Logits, drawing: Sequence[VerifySession], rounds: Sequence[Round], drawn: DrawnTokens | None
) -> Callable[[], Sequence[TokenLogprobs | None]]:
    """Tells a device to find log-probabilities together with the draws, if the rounds emit nothing but these.

    Returns:
        A function that waits for them: for each round that of its token (`begin_drawn_logprobs`), or nothing for all.
    """
    reports = [session.spec.report for session in drawing]
    if drawn is None or all(report.logprobs is None for report in reports):
        return tuple
    # Few drafted rows are accepted, and no batch is launched before their verdicts.
    if any(len(each.output_indices) > 1 for each in rounds):
        return tuple
    return begin_drawn_logprobs(logits, drawn, reports)


def tell_of_prompts(logits: Logits, batch: Batch, isolated: Isolated) -> Logits:
    """Tells sessions that ask for it what the forward finds out about their prompts; returns the logits of all other
    rows."""
    work, segments = batch.work, batch.segments
    if not any(session.round.num_prompt_rows for session in work):
        return logits
    num_prompt_rows = [session.round.num_prompt_rows for session in work]
    counts = [(segment.num_logits, count) for segment, count in zip(segments, num_prompt_rows, strict=True)]
    others, of_prompts = without_prompts(logits, counts)
    for session, segment, rows in zip(work, segments, of_prompts, strict=True):
        if session.round.num_prompt_rows:
            # The rows are in the cache by now.
            with isolated(session.spec.session_id):
                session.reports.add_prompt(rows, segment.cache.length - len(segment.token_ids))
    return others
