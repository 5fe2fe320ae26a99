"""Why a round verifies nothing is told apart."""

from __future__ import annotations

import pytest

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.methods import METHODS
from outrider.verifier.round import EmptyRoundReason, empty_round_reason

PEARL, RETRIEVAL = Strategy(METHODS["pearl"]), Strategy(METHODS["retrieval"])
WAITED_IN_VAIN = {
    "has_drafter": True,
    "is_attached": True,
    "has_drafted": True,
    "is_answered": False,
    "was_awaited": True,
}


@pytest.mark.parametrize(
    ("strategy", "changed", "reason"),
    [
        (PEARL, {}, EmptyRoundReason.DRAFT_TIMEOUT),
        (PEARL, {"was_awaited": False}, EmptyRoundReason.NOT_AWAITED),
        (PEARL, {"is_answered": True}, EmptyRoundReason.NO_DRAFT),
        (PEARL, {"has_drafted": False}, EmptyRoundReason.DRAFT_PENDING),
        (PEARL, {"is_attached": False}, EmptyRoundReason.DRAFT_DOWN),
        (PEARL, {"is_attached": False, "has_drafter": False}, None),
        (RETRIEVAL, {"has_drafter": False}, EmptyRoundReason.NO_MATCH),
        (RETRIEVAL, {}, EmptyRoundReason.NO_MATCH),
        # What auto goes over to when its drafter is gone has the same reason.
        (RETRIEVAL, {"is_attached": False}, EmptyRoundReason.DRAFT_DOWN),
        (PLAIN, {"is_attached": False}, EmptyRoundReason.DRAFT_DOWN),
        (PLAIN, {}, None),
        (PLAIN, {"has_drafter": False}, None),
    ],
)
def test_a_round_without_a_draft_has_a_reason(
    strategy: Strategy, changed: dict[str, bool], reason: EmptyRoundReason | None
) -> None:
    assert empty_round_reason(strategy, **(WAITED_IN_VAIN | changed)) is reason
