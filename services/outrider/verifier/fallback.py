"""Why a round verifies nothing though its method would have."""

from __future__ import annotations

from enum import Enum

from outrider.core.experience import Way


class Fallback(Enum):
    """The reasons. The values are those of the metrics."""

    LOAD = "load"
    """Sessions share the rows of a forward, and none were left for drafts."""
    DRAFT_DOWN = "draft_down"
    """The speculator, or the caller that drafts, is gone."""
    NO_MATCH = "no_match"
    """The method only retrieves, and nothing was found."""
    DRAFT_PENDING = "draft_pending"
    """The drafter is there, and its first draft has not come: it reads the prompt."""
    NO_DRAFT = "no_draft"
    """The drafter has answered, with nothing that fits."""
    NOT_AWAITED = "not_awaited"
    """No draft was there, and waiting for one was worth nothing."""
    DRAFT_TIMEOUT = "draft_timeout"
    """A draft was waited for, for as long as it was worth, and has not come."""


def why_nothing(
    way: Way, *, has_drafter: bool, is_attached: bool, has_drafted: bool, is_answered: bool, was_awaited: bool
) -> Fallback | None:
    """Why a round that goes this way has nothing to verify; None = because it wants nothing.

    Args:
        way: That of the round.
        has_drafter: Whether somebody should draft.
        is_attached: Whether a drafter is there.
        has_drafted: Whether anything has come from it.
        is_answered: Whether the latest commit is.
        was_awaited: Whether the round waited for that.
    """
    if has_drafter and not is_attached:
        return Fallback.DRAFT_DOWN
    if way.is_plain or (way.method.has_draft_model and not has_drafter):
        return None
    if not way.method.has_draft_model:
        return Fallback.NO_MATCH
    if not has_drafted:
        return Fallback.DRAFT_PENDING
    if is_answered:
        return Fallback.NO_DRAFT
    return Fallback.DRAFT_TIMEOUT if was_awaited else Fallback.NOT_AWAITED
