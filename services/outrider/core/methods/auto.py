"""`auto`: the verifier chooses among other methods, round after round (`outrider.core.auto`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from outrider.core.methods import best_first, double, pearl, retrieval, saguaro
from outrider.core.params import Rows
from outrider.core.speculation import OFF, Choice, Method, SpeculationParams


def _choices(rows: Rows, retrieves: bool, shares_gpu: bool) -> tuple[Choice, ...]:
    drafted: tuple[Choice, ...] = ((best_first.METHOD, rows, retrieves),)
    # On a GPU that both models share, the draft model has it to itself only while the target waits: drafting ahead is
    # slow there, and slows the target down. `best-first` takes turns with it (`outrider.core.methods.best_path`).
    if not shares_gpu:
        drafted += ((saguaro.METHOD, Rows.CHAIN, False), (pearl.METHOD, Rows.CHAIN, False))
    if retrieves:
        drafted += ((double.METHOD, Rows.CHAIN, True), (retrieval.METHOD, Rows.CHAIN, True))
    return (*drafted, (OFF, Rows.CHAIN, False))


def _on_shared_gpu(params: SpeculationParams, given: Collection[str]) -> SpeculationParams:
    # DOUBLE, section D.8. A request for the method itself decides this by its own field.
    return params.with_own(
        replace(params.of(best_first.BestFirstParams), serial=True),
        replace(params.of(double.DoubleParams), serial=True),
    )


METHOD = Method(
    "auto",
    "the verifier chooses",
    "#D55E00",
    rows=Rows.TREE,
    takes_as_pay=True,
    always_retrieves=True,
    choices=_choices,
    on_shared_gpu=_on_shared_gpu,
)
