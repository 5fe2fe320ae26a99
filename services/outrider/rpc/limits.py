"""What a server allows a request's speculation."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.params import RetrievalScope
from outrider.core.speculation import MAX_BEAM_WIDTH, MAX_BUDGET, MAX_ROWS


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Limits of a request's parameters: what goes beyond is refused, and the message has the limit."""

    max_num_speculative_tokens: int = 64
    max_num_rows: int = MAX_ROWS
    """Of `max_rows`."""
    max_beam_width: int = MAX_BEAM_WIDTH
    max_budget: int = MAX_BUDGET
    """Of the outcomes that SAGUARO drafts for at a time."""
    spacelike_scope: RetrievalScope = RetrievalScope.TENANT
    """Of METHOD_SPACELIKE where the request does not say: alone with itself, a session has nothing to look up."""

    @property
    def max_lookahead(self) -> int:
        """Limit of `lookahead`: sixteen full chains in flight hide any round trip that is worth hiding."""
        return 16 * self.max_num_speculative_tokens
