"""The parts in simulated time, by their names: the one list that plan, claims, pictures and report go by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from matplotlib.figure import Figure

from outrider_bench.experiment import Experiment
from outrider_bench.measured import Measured
from outrider_bench.result import Measurement
from outrider_bench.suites.methods.simulated import (
    batch,
    card,
    double,
    published,
    saguaro,
    sources,
    spacelike,
    speculative,
)
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes


class SimulatedPart(Protocol):
    """The module of a part."""

    PART: str
    TITLE: str
    """Heads the part's chapter in the report."""

    def experiments(self, sizes: SimulatedSizes) -> list[Experiment]:
        """List the experiments of this part."""

    def claims(self, measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
        """Return the claims of this part, each beside the paper's figure."""

    def draw(self, found: Mapping[str, Mapping[str, Any]], results: Mapping[str, Any]) -> Figure | None:
        """Draw a picture of the experiments by their names; None if there is nothing to draw."""


_MODULES: tuple[SimulatedPart, ...] = (saguaro, card, double, spacelike, speculative, sources, published, batch)
SIMULATED: Mapping[str, SimulatedPart] = {module.PART: module for module in _MODULES}
"""Modules by the part that they measure."""
