"""A forward that sessions share: who is ready for it, how its rows are drawn from, and what else is read of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from outrider.core.costs import HOLD_SHARE, Contexts
from outrider.core.reports import TokenLogprobs
from outrider.core.retrieval.ngrams import Follower
from outrider.core.retrieval.recycling import NUM_NEXT
from outrider.models.logprobs import begin_drawn_logprobs, without_prompts
from outrider.models.packing import Segment
from outrider.models.pending_draft import TokensOnDevice
from outrider.models.ratio import PendingRounds, Round
from outrider.models.sampling import DrawnTokens, Logits, begin_most_probable
from outrider.models.timing import Timing
from outrider.verifier.rounds_behind_drafts import RoundBehind
from outrider.verifier.session import VerifySession

Isolated = Callable[[str], AbstractContextManager[object]]
"""Makes a context that loses the session of this id if its body raises: see `EngineThread.isolated`."""


class AskedTimes(NamedTuple):
    """Holds the times of a forward that the device has been asked for."""

    timing: Timing
    timed: float
    """Time from which `timing` measures, if the device had nothing else to do then."""
    asked: float
    """Time at which the device had been asked."""


class PlannedForward(NamedTuple):
    """Describes a forward: its rows, and what is drawn behind them."""

    work: Sequence[VerifySession]
    segments: Sequence[Segment]
    """Rows of each session; their token ids are places in `drawn`, if that is given."""
    drawing: Sequence[VerifySession]
    """Those of the sessions that get a verdict."""
    rounds: Sequence[Round]
    """For each of these, how it is drawn for."""
    started: float
    """Time at which the step began."""
    drawn: TokensOnDevice | None = None
    """Tokens that the device has, or is at. None means that token ids are known."""
    behind: RoundBehind | None = None
    """The rows behind a draft that the host does not know yet. None for any other forward."""
    num_rows_of_others: int = 0
    """Rows of the forward of other sessions that the device is at when it is asked for this one. 0 if it is not."""

    @property
    def num_rows(self) -> int:
        """Rows of all sessions."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def drafted_at(self) -> float:
        """Time at which the draft of `behind` was there. 0 means that there is none."""
        return 0.0 if self.behind is None else self.behind.draft.ended_at


class AskedForward(NamedTuple):
    """A forward that the device has been asked for, and for the draws behind it."""

    plan: PlannedForward
    contexts: Contexts
    logits: Logits
    """Those that are drawn from."""
    draws: PendingRounds
    next_tokens: Callable[[], Sequence[list[Follower]]]
    """Waits for the most probable next tokens of every row: none for rows of whose sessions nobody wants them, an empty
    list if none does."""
    logprobs: Callable[[], Sequence[TokenLogprobs | None]]
    """Waits for the log-probabilities of draws: for each round its token's, None where they are found behind the
    verdict. Empty if they all are."""
    times: AskedTimes
    void: Collection[VerifySession] = ()
    """Those of the sessions whose rows mean nothing: the host has drawn other tokens for them."""


def ready_sessions(
    sessions: Iterable[VerifySession], now: float, forward_ms: float, isolated: Isolated
) -> tuple[list[VerifySession], float | None]:
    """Returns the sessions whose round begins now.

    Args:
        sessions: Those that may take part.
        now: The time, in seconds, as `VerifySession` is told it.
        forward_ms: Time of a forward, in milliseconds: rounds that are ready are held for the others for a share of it;
            where all of them take turns with the draft model, until its drafts are there.
        isolated: Loses a session that cannot choose its rows.

    Returns:
        The sessions, and None; or no session, and how many seconds others are worth waiting for.
    """
    ready: list[VerifySession] = []
    waiting: list[VerifySession] = []
    for session in sessions:
        with isolated(session.session.spec.session_id):
            (ready if session.is_ready(now) else waiting).append(session)
    if not waiting:
        return ready, None
    until = min(session.deadline for session in waiting)
    # Those that take turns with the draft model begin together: a forward of some would slow the others' drafts down.
    if ready and not all(session.takes_turns for session in (*ready, *waiting)):
        held_since = min(session.ready_since or now for session in ready)
        until = min(until, held_since + HOLD_SHARE * forward_ms / 1e3)
        if until <= now:
            return ready, None
    return [], max(0.0, until - now)


def round_of(session: VerifySession) -> Round:
    """Describes the rows of a session for the sampler: the noise of each is keyed by its output index."""
    generation = session.session
    first = generation.num_output_tokens
    # Minus the length of the prompt: what follows position p has the output index p + 1 + offset.
    offset = first - len(generation.committed)
    indices = [first, *[node.position + 1 + offset for node in session.nodes]]
    chain = session.nodes if generation.decides_by_ratio else None
    sampling, structured = generation.spec.sampling, generation.structured
    return Round(sampling, indices, chain, session.adjustments(), session.nodes, structured)


def wanted_temperatures(session: VerifySession) -> list[float | None]:
    """Returns for each row of a session the temperature at which its most probable tokens are wanted; None where they
    are not."""
    temperature = session.session.spec.sampling.temperature
    return [temperature if session.wants_next_tokens else None] * (1 + len(session.nodes))


def begin_next_tokens(logits: Logits, drawing: Sequence[VerifySession]) -> Callable[[], Sequence[list[Follower]]]:
    """Tells the device to find what `AskedForward.next_tokens` returns."""
    if not any(session.wants_next_tokens for session in drawing):
        return tuple
    wanted = [temperature for session in drawing for temperature in wanted_temperatures(session)]
    return begin_most_probable(logits, wanted, NUM_NEXT)


def begin_logprobs(
    logits: Logits, drawing: Sequence[VerifySession], rounds: Sequence[Round], drawn: DrawnTokens | None
) -> Callable[[], Sequence[TokenLogprobs | None]]:
    """Tells a device to find log-probabilities together with the draws, where these are all that rounds emit.

    Returns:
        What waits for them: for each round its token's (`begin_drawn_logprobs`), or nothing for all.
    """
    reports = [session.session.spec.report for session in drawing]
    if drawn is None or all(report.logprobs is None for report in reports):
        return tuple
    # Of drafted rows few are accepted, and nothing is asked for ahead of those.
    if any(len(each.output_indices) > 1 for each in rounds):
        return tuple
    return begin_drawn_logprobs(logits, drawn, reports)


def is_decoding(work: Sequence[VerifySession], segments: Sequence[Segment]) -> bool:
    """Returns False for a forward with a piece of a prompt in it, the last one too: it says nothing of those that only
    decode."""
    # Rows without logits are those of prompts.
    is_reading = any(session.num_prompt_rows for session in work)
    return not is_reading and all(len(segment.token_ids) == segment.num_logits for segment in segments)


def tell_of_prompts(
    logits: Logits, work: Sequence[VerifySession], segments: Sequence[Segment], isolated: Isolated
) -> Logits:
    """Tells sessions what the forward says of their prompts, where they ask for it; returns the logits of all other
    rows."""
    if not any(session.num_prompt_rows for session in work):
        return logits
    counts = [(segment.num_logits, session.num_prompt_rows) for session, segment in zip(work, segments, strict=True)]
    others, of_prompts = without_prompts(logits, counts)
    for session, segment, rows in zip(work, segments, of_prompts, strict=True):
        if session.num_prompt_rows:
            # The rows are in the cache by now.
            with isolated(session.session.spec.session_id):
                session.reports.add_prompt(rows, segment.cache.length - len(segment.token_ids))
    return others
