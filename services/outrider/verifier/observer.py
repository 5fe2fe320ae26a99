"""Records one session while it streams: its counts, what its tenant is charged, its spans and its log."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import structlog

from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import COUNTS
from outrider.security.quotas import TenantQuota
from outrider.telemetry.generation_metrics import GenerationCall
from outrider.telemetry.tracing import Attributes, current_span
from outrider.v1 import verifier_pb2
from outrider.verifier.generation import Generation
from outrider.verifier.metrics import SessionCounts
from outrider.wire.handshake import Model

log = structlog.get_logger(__name__)


class SessionObserver:
    """Records one session, as a context around its rounds.

    Its phases have spans: prefill up to the first verdict, decode from there on. The span of the call gets the outcome.
    """

    def __init__(
        self, generation: Generation, model: Model, call: GenerationCall, quota: TenantQuota, counts: SessionCounts
    ) -> None:
        """
        Args:
            generation: The session.
            model: The target.
            call: Times the call.
            quota: Charged for the tokens.
            counts: Counts of all sessions.
        """
        self._generation, self._model = generation, model
        self._call, self._quota, self._counts = call, quota, counts
        self._span = current_span()
        self._last: Verdict | None = None

    def __enter__(self) -> Self:
        spec = self._generation.spec
        self._counts.begin(spec)
        log.info(
            "session.started",
            session_id=spec.session_id,
            method=spec.speculation.method.name,
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_tokens=spec.max_tokens,
            **self._span.log_fields,
        )
        if self._span.is_recorded:
            self._span.set_attributes(_opening_attributes(spec, self._model))
        self._call.admit()
        self._phase = self._span.child("prefill")
        return self

    def on_verdict(self, verdict: Verdict) -> None:
        """Records a round, before its tokens are sent."""
        if self._last is None:
            self._phase.end()
            self._phase = self._span.child("decode")
        self._last = verdict
        self._quota.charge(len(verdict.token_ids))
        self._call.chunk(len(verdict.token_ids))
        if verdict.finish_reason is not None:
            # No earlier: the engine's thread writes to the statistics until the last verdict.
            self._counts.end(self._generation.statistics)

    def on_finished(self, reason: verifier_pb2.FinishReason) -> None:
        """Records that everything was sent."""
        self._call.finish(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        if self._span.is_recorded:
            self._span.set_attributes(_outcome_attributes(self._generation, self._last))
        spec, statistics = self._generation.spec, self._generation.statistics
        log.info("session.ended", session_id=spec.session_id, num_rounds=statistics.num_rounds)


def _opening_attributes(spec: SessionSpec, model: Model) -> Attributes:
    """Returns what is known when a session begins. The prompt is left out: more people read traces."""
    sampling = spec.sampling
    said = {
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed if sampling.seed < 2**63 else 0,  # an integer of OpenTelemetry has a sign
    }
    return {
        "gen_ai.request.model": model.model_id,
        "gen_ai.response.model": model.model_id,
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        **{f"gen_ai.request.{name}": value for name, value in said.items() if value},
        "gen_ai.usage.input_tokens": len(spec.prompt_token_ids),
        "outrider.session_id": spec.session_id,
        "outrider.method": spec.speculation.method.name,
        "outrider.num_resumed_tokens": len(spec.resume_token_ids),
    }


def _outcome_attributes(generation: Generation, last: Verdict | None) -> Attributes:
    """Returns what is known when a session ends.

    Args:
        generation: The session. If it was cut off, rounds after `last` may be counted or not.
        last: The latest verdict that was passed on. None means that there was none.
    """
    statistics, num_output_tokens = generation.statistics, len(generation.spec.resume_token_ids)
    reasons: list[str] = []
    if last is not None:
        num_output_tokens = last.base_len + len(last.token_ids) - len(generation.spec.prompt_token_ids)
        reasons = [] if last.finish_reason is None else [last.finish_reason.name.lower()]
    return {
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.num_cached_prompt_tokens,
        "gen_ai.response.finish_reasons": reasons,
        **{f"outrider.{name}": getattr(statistics, name) for name in COUNTS},
        "outrider.mean_acceptance_length": statistics.mean_acceptance_length,
        "outrider.degraded": statistics.degraded,
    }
