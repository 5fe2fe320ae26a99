"""Why a round verifies nothing is told apart."""

from __future__ import annotations

import pytest

from outrider.core.experience import Way
from outrider.core.params import Method
from outrider.verifier.fallback import Fallback, why_nothing

PEARL, RETRIEVAL, OFF = Way(Method.PEARL), Way(Method.RETRIEVAL), Way(Method.OFF)
WAITED_IN_VAIN = {
    "has_drafter": True,
    "is_attached": True,
    "has_drafted": True,
    "is_answered": False,
    "was_awaited": True,
}


@pytest.mark.parametrize(
    ("way", "changed", "reason"),
    [
        (PEARL, {}, Fallback.DRAFT_TIMEOUT),
        (PEARL, {"was_awaited": False}, Fallback.NOT_AWAITED),
        (PEARL, {"is_answered": True}, Fallback.NO_DRAFT),
        (PEARL, {"has_drafted": False}, Fallback.DRAFT_PENDING),
        (PEARL, {"is_attached": False}, Fallback.DRAFT_DOWN),
        (PEARL, {"is_attached": False, "has_drafter": False}, None),
        (RETRIEVAL, {"has_drafter": False}, Fallback.NO_MATCH),
        (RETRIEVAL, {}, Fallback.NO_MATCH),
        # What auto goes over to when its drafter is gone has the same reason.
        (RETRIEVAL, {"is_attached": False}, Fallback.DRAFT_DOWN),
        (OFF, {"is_attached": False}, Fallback.DRAFT_DOWN),
        (OFF, {}, None),
        (OFF, {"has_drafter": False}, None),
    ],
)
def test_a_round_without_a_draft_has_a_reason(way: Way, changed: dict[str, bool], reason: Fallback | None) -> None:
    assert why_nothing(way, **(WAITED_IN_VAIN | changed)) is reason
