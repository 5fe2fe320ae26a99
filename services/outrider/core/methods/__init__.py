"""All methods of speculation. A method is one file of this package with its parameters, its growth policy and its
description, `METHOD`; and its name here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from outrider.core import speculation
from outrider.core.growth import GrowthPolicy
from outrider.core.methods import (
    auto,
    best_first,
    card,
    double,
    opt_tree,
    pearl,
    retrieval,
    saguaro,
    sequoia,
    spacelike,
    speculative,
)
from outrider.core.speculation import Method, SpeculationParams

OFF = speculation.OFF
SPECULATIVE = speculative.METHOD
PEARL = pearl.METHOD
RETRIEVAL = retrieval.METHOD
CARD = card.METHOD
SAGUARO = saguaro.METHOD
DOUBLE = double.METHOD
SPACELIKE = spacelike.METHOD
BEST_FIRST = best_first.METHOD
OPT_TREE = opt_tree.METHOD
SEQUOIA = sequoia.METHOD
AUTO = auto.METHOD

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        OFF,
        SPECULATIVE,
        PEARL,
        RETRIEVAL,
        CARD,
        SAGUARO,
        DOUBLE,
        SPACELIKE,
        BEST_FIRST,
        OPT_TREE,
        SEQUOIA,
        AUTO,
    )
}
"""Methods by their names, in the order in which users see them."""

if TYPE_CHECKING:
    MethodName = str
else:
    # A type checker cannot read a Literal that is computed.
    MethodName = Literal[tuple(METHODS)]


def growth_policy(params: SpeculationParams) -> GrowthPolicy:
    """Returns a new policy for one session.

    Raises:
        ValueError: The method has no growth policy.
    """
    if params.method.grow is None:
        raise ValueError(f"method must be one with a growth policy, got {params.method.name}")
    return params.method.grow(params)
