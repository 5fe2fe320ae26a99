"""The registry of growth policies by method.

A new policy is one file in this package, one line here, a `Method` in `outrider.core.params`, and its value in the
protos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.core.growth import GrowthPolicy
from outrider.core.methods.best_first import best_first_growth
from outrider.core.methods.card import CardGrowth
from outrider.core.methods.chain import double_growth, pearl_growth, speculative_growth
from outrider.core.methods.opt_tree import OptTreeGrowth
from outrider.core.methods.saguaro import SaguaroGrowth
from outrider.core.methods.sequoia import SequoiaGrowth
from outrider.core.params import Method, SpeculationParams

GROWTH_POLICIES: Mapping[Method, Callable[[SpeculationParams], GrowthPolicy]] = {
    Method.SPECULATIVE: speculative_growth,
    Method.PEARL: pearl_growth,
    Method.CARD: CardGrowth,
    Method.SAGUARO: SaguaroGrowth,
    Method.DOUBLE: double_growth,
    Method.BEST_FIRST: best_first_growth,
    Method.OPT_TREE: OptTreeGrowth,
    Method.SEQUOIA: SequoiaGrowth,
}


def growth_policy(params: SpeculationParams) -> GrowthPolicy:
    """Returns a new policy for one session.

    Raises:
        ValueError: The method has no draft model, or is `Method.AUTO`, which chooses among the others.
    """
    policy = GROWTH_POLICIES.get(params.method)
    if policy is None:
        raise ValueError(f"method must be one with a growth policy, got {params.method.value}")
    return policy(params)
