"""What the engine tells whoever has begun a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.core.session import Verdict
from outrider.core.statistics import Statistics
from outrider.core.steering import Steering
from outrider.verifier.continuations import Question


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a generation wants of its peers after a round."""

    question: Question | None = None
    """For the datastore."""
    steering: Steering | None = None
    """For the speculator."""


class GenerationSink(Protocol):
    """Where a generation's events go. Called on the event loop."""

    def on_verdict(self, verdict: Verdict, statistics: Statistics, wishes: Wishes) -> None:
        """A round is over. The last verdict has a finish reason; only then may the statistics be read."""

    def on_question(self, question: Question) -> None:
        """The datastore's last answer raises another question."""

    def on_failure(self) -> None:
        """The engine could not go on; its log says why."""
