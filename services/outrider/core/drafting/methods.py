"""Which policy a method has."""

from __future__ import annotations

import math

from outrider.core.drafting.best_first import BestFirstGrowth
from outrider.core.drafting.card import CardGrowth
from outrider.core.drafting.chain import ChainGrowth, SampledChainGrowth
from outrider.core.drafting.policy import GrowthPolicy
from outrider.core.drafting.saguaro import SaguaroGrowth
from outrider.core.params import Method, SpeculationParams


def growth_policy(params: SpeculationParams) -> GrowthPolicy:
    """The policy of a method, for one session. ValueError for a method without a draft model."""
    probability = params.min_path_probability
    min_chain_logprob = math.log(probability) if probability > 0 else -math.inf
    gamma = params.num_speculative_tokens
    match params.method:
        case Method.SPECULATIVE if params.is_ratio:
            return SampledChainGrowth(gamma, gamma, probability, goes_on=False)
        case Method.PEARL if params.is_ratio:
            return SampledChainGrowth(params.lookahead, gamma, probability, goes_on=True)
        case Method.DOUBLE if params.is_ratio and params.double.serial:
            # The target waits for the whole chain, however long a forward takes.
            return SampledChainGrowth(gamma, gamma, probability, goes_on=False)
        case Method.DOUBLE if params.is_ratio:
            # How far a forward gets depends on the samples, so each is a message.
            return SampledChainGrowth(params.lookahead, 1, probability, goes_on=True)
        case Method.SPECULATIVE | Method.DOUBLE if params.method is Method.SPECULATIVE or params.double.serial:
            return ChainGrowth(gamma, min_chain_logprob, gamma, min_chain_logprob)
        case Method.PEARL | Method.DOUBLE:
            # After a hit the root moves down the chain and the rest of the path is worth more: twice the logarithm
            # lets the chain that comes after the present one exist already.
            return ChainGrowth(params.lookahead, 2 * min_chain_logprob, gamma, min_chain_logprob)
        case Method.CARD:
            return CardGrowth(params)
        case Method.SAGUARO:
            return SaguaroGrowth(params)
        case Method.BEST_FIRST:
            return BestFirstGrowth(params)
        case _:
            raise ValueError(f"method {params.method.value} has no draft model")
