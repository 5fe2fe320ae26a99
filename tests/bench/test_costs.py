"""Costs of simulated pairs, as they are sent to a worker."""

from __future__ import annotations

import json

import pytest

from outrider_bench.costs import CPU, GPU, Costs


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["CPU", "GPU"])
def test_costs_are_the_same_after_their_way_through_json(costs: Costs) -> None:
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs
