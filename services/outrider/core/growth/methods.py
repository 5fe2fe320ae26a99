"""Which policy a method has."""

from __future__ import annotations

import math

from outrider.core.growth.chain import ChainGrowth
from outrider.core.growth.policy import GrowthPolicy
from outrider.core.params import Method
from outrider.core.speculation import SpeculationParams


def growth_policy(params: SpeculationParams) -> GrowthPolicy:
    """The policy of a method, for one session. ValueError for a method without a draft model."""
    probability = params.min_path_probability
    min_chain_logprob = math.log(probability) if probability > 0 else -math.inf
    gamma = params.num_speculative_tokens
    match params.method:
        case Method.SPECULATIVE:
            return ChainGrowth(gamma, min_chain_logprob, gamma, min_chain_logprob)
        case Method.PEARL:
            # After a hit the root moves down the chain and the rest of the path is worth more: twice the logarithm
            # lets the chain that comes after the present one exist already.
            return ChainGrowth(params.lookahead, 2 * min_chain_logprob, gamma, min_chain_logprob)
        case _:
            raise ValueError(f"method {params.method.value} has no draft model")
