"""Steering crosses the wire unchanged."""

from __future__ import annotations

import pytest

from outrider.core.methods import PEARL, SPECULATIVE
from outrider.core.speculation import SpeculationLimits, SpeculationParams, Steering
from outrider.wire.steering import steering_from_proto, steering_to_proto

OPENED = SpeculationParams(PEARL, 4, 16)


@pytest.mark.parametrize(
    "steering",
    [
        Steering(),
        Steering(forward_us=5000, round_trip_us=300, max_num_nodes=7),
        Steering(OPENED, max_num_nodes=1),
        Steering(SpeculationParams(SPECULATIVE, 3, 16), 1, 2, 3),
    ],
)
def test_steering_crosses_the_wire_as_it_is(steering: Steering) -> None:
    assert steering_from_proto(steering_to_proto(steering), OPENED, SpeculationLimits()) == steering


def test_what_comes_later_replaces_what_it_says_and_leaves_the_rest() -> None:
    first = Steering(OPENED, 5000, 300, 7)
    assert first.then(Steering()) == first
    assert first.then(Steering(forward_us=6000, max_num_nodes=3)) == Steering(OPENED, 6000, 300, 3)
