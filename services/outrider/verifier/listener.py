"""The listener of a generation, which hears from the engine: the boundary between its thread and the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.core.session import Verdict
from outrider.core.speculation import Steering
from outrider.core.statistics import Statistics
from outrider.rounds.retrieval import Question


class PeerRequests(NamedTuple):
    """Requests that a generation sends to its peers after a round: a lookup for the datastore, new parameters for the
    speculator."""

    question: Question | None = None
    """Lookup for the datastore. None means that nothing is asked."""
    steering: Steering | None = None
    """Parameters and measured times for the drafter. None means that it goes on as before."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Says that a generation waits for room in the pool of keys and values."""

    num_waiting: int
    """Generations that wait, this one included."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Says how much of its text a generation has read: of the prompt, or, after a preemption, of all its text."""

    num_read_tokens: int
    num_tokens: int
    """Tokens that are to be read."""


class GenerationListener(Protocol):
    """Receives what a generation decides. Called on the event loop."""

    def on_begun(self, steering: Steering, max_forward_us: int) -> None:
        """Called before the first verdict of `auto`, when the session has chosen how to begin.

        Args:
            steering: How the drafter goes on from the parameters that it is opened with (`opening_params`). A pause
                means that no drafts are wanted yet.
            max_forward_us: A drafter whose forward takes longer than this begins with a pause; see `SpeculationSpec`.
        """

    def on_verdict(self, verdict: Verdict, statistics: Statistics, requests: PeerRequests) -> None:
        """Called after each round. The last verdict has a finish reason; only then may the statistics be read."""

    def on_admitted(self, num_cached_tokens: int) -> None:
        """Called when the generation gets room in the pool, at first and after each preemption. `num_cached_tokens`:
        tokens of its text, from the first on, whose keys and values were cached."""

    def on_news(self, news: NoRoom | Reading) -> None:
        """Called after `Engine.ask_for_news`, if there is a reason why no verdict comes."""

    def on_no_room(self) -> None:
        """Called if there was no room in time. Nothing has been generated."""

    def on_broken(self, reason: str) -> None:
        """Called if the text cannot go on under its structure."""

    def on_failure(self, is_own: bool) -> None:
        """Called if the engine could not go on; its log says why. `is_own` is as `OnFailure` has it."""
