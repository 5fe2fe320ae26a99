"""Why a round verifies nothing though its method would have."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a session has had of its drafter when a round begins."""

    has_drafter: bool
    """Whether there should be one."""
    is_attached: bool
    has_drafted: bool
    is_answered: bool
    """Whether the latest commit is."""
    was_awaited: bool

    def why_nothing(self, way: Way) -> Fallback | None:
        """Why a round that goes this way has nothing to verify; None = because it wants nothing."""
        if self.has_drafter and not self.is_attached:
            return Fallback.DRAFT_DOWN
        if way.is_plain or (way.method.has_draft_model and not self.has_drafter):
            return None
        if not way.method.has_draft_model:
            return Fallback.NO_MATCH
        if not self.has_drafted:
            return Fallback.DRAFT_PENDING
        if self.is_answered:
            return Fallback.NO_DRAFT
        return Fallback.DRAFT_TIMEOUT if self.was_awaited else Fallback.NOT_AWAITED
