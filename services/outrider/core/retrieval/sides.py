"""The plans of retrieval of the two sides of a session, by its parameters."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.params import Rows
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.speculation import SpeculationParams


def target_plan(params: SpeculationParams) -> RetrievalPlan | None:
    """Returns the verifier's plan. None means that it looks nothing up."""
    if params.method.plans:
        return _as_asked(params.method.plans[0](params), params)
    if not params.retrieves:
        return None
    plan = RetrievalPlan(sources=params.sources, is_remote=params.remote, looks_ahead=params.remote)
    # Next to a draft model the tiers continue its best path, as they always have.
    has_branches = params.rows is Rows.TREE and (not params.method.has_draft_model or plan.has_own_sources)
    return _as_asked(replace(plan, has_branches=has_branches), params)


def draft_plan(params: SpeculationParams) -> RetrievalPlan | None:
    """Returns the speculator's plan. None means that it looks nothing up."""
    if params.method.plans:
        return _as_asked(params.method.plans[1](params), params)
    # A draft forward does not wait for an answer of the datastore.
    if not params.method.has_draft_model or not params.retrieves or params.remote:
        return None
    tiers = RetrievalPlan(sources=params.sources).tiers
    return _as_asked(RetrievalPlan(sources=tiers), params) if tiers else None


def _as_asked(plan: RetrievalPlan | None, params: SpeculationParams) -> RetrievalPlan | None:
    """Returns a plan with the settings that are common to all methods."""
    # Under the ratio rule a guess that knew the noise of the target's next token would change the text's distribution.
    by_noise = params.shared_noise and not params.is_ratio
    return plan and replace(plan, is_ranked_by_noise=by_noise, is_calibrated=params.calibration)
