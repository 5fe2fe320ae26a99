"""What there is to go on with: the ways that `Method.AUTO` chooses among, and what a drafter is told of them."""

from __future__ import annotations

from dataclasses import replace

from outrider.core.experience import Way
from outrider.core.params import Method, Rows
from outrider.core.speculation import SpeculationParams

OFF = Way(Method.OFF)


def ways_of(params: SpeculationParams) -> tuple[Way, ...]:
    """What `Method.AUTO` chooses among, the one expected to be best first; a single way for every other method."""
    if params.method is not Method.AUTO:
        return (Way(params.method, params.rows, params.retrieves),)
    retrieval = params.retrieves
    drafted = Way(Method.BEST_FIRST, params.rows, retrieval), Way(Method.PEARL, Rows.CHAIN, False)
    retrieved = (Way(Method.DOUBLE, Rows.CHAIN, True), Way(Method.RETRIEVAL, Rows.CHAIN, True)) if retrieval else ()
    return (*drafted, *retrieved, OFF)


def opening_params(params: SpeculationParams) -> SpeculationParams:
    """What a drafter is opened with: a method that it knows."""
    return params_of(ways_of(params)[0], params) if params.method is Method.AUTO else params


def params_of(way: Way, params: SpeculationParams) -> SpeculationParams:
    """The parameters for going that way. Methods without a draft model pause the drafter."""
    if not way.method.has_draft_model:
        return SpeculationParams(Method.OFF)
    return replace(params, method=way.method, rows=way.rows, retrieval=way.retrieval)
