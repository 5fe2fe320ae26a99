"""What the trace of a session says: how it was asked for, its phases, and how it went."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from outrider.core.session import SessionSpec, Verdict
from outrider.rpc.handshake import Model
from outrider.rpc.tracing import Attributes, Span
from outrider.verifier.generation import Generation


class SessionSpans:
    """Around the rounds of a session: the spans of its phases, prefill up to the first verdict and decode from there
    on, and at the end what has come of it."""

    def __init__(self, session: Span, generation: Generation) -> None:
        """`session`: the span of the call."""
        self._session, self._generation = session, generation
        self._phase = session.child("prefill")
        self._last: Verdict | None = None

    def on_verdict(self, verdict: Verdict) -> None:
        """A round is over."""
        if self._last is None:
            self._phase.end()
            self._phase = self._session.child("decode")
        self._last = verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        if self._session.is_recorded:
            self._session.say(outcome_attributes(self._generation, self._last))


def opening_attributes(spec: SessionSpec, model: Model) -> Attributes:
    """What is known when a session begins. Its prompt is not among it."""
    return {
        "gen_ai.request.model": model.model_id,
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": spec.sampling.temperature,
        "gen_ai.usage.input_tokens": len(spec.prompt_token_ids),
        "outrider.session_id": spec.session_id,
        "outrider.method": spec.speculation.method.value,
        "outrider.num_resumed_tokens": len(spec.resume_token_ids),
    }


def outcome_attributes(generation: Generation, last: Verdict | None) -> Attributes:
    """What is known when it ends. `last`: the latest verdict; None = there was none. Of a session that was cut off, the
    rounds that nobody has heard of may be counted or not."""
    statistics, num_output_tokens = generation.statistics, len(generation.spec.resume_token_ids)
    reasons: list[str] = []
    if last is not None:
        num_output_tokens = last.base_len + len(last.token_ids) - len(generation.spec.prompt_token_ids)
        reasons = [] if last.finish_reason is None else [last.finish_reason.name.lower()]
    return {
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.response.finish_reasons": reasons,
        "outrider.num_rounds": statistics.num_rounds,
        "outrider.num_drafted_tokens": statistics.num_drafted_tokens,
        "outrider.num_accepted_tokens": statistics.num_accepted_tokens,
        "outrider.mean_acceptance_length": statistics.mean_acceptance_length,
        "outrider.num_speculator_losses": statistics.num_speculator_losses,
        "outrider.degraded": statistics.degraded,
    }
