"""What a verifier tells a speculator in the middle of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.speculation import SpeculationParams


@dataclass(frozen=True, slots=True)
class Steering:
    """Go on differently. What was grown so far stays."""

    speculation: SpeculationParams | None = None
    """Grow like this from here on; Method.OFF = pause. None = as before."""
    forward_us: int = 0
    """What one forward of the target takes; 0 = as before."""
    round_trip_us: int = 0
    """From a commit sent to the first draft that answers it, the drafting itself not counted; 0 = as before."""
