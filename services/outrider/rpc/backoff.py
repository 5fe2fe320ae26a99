"""Waiting longer each time."""

from __future__ import annotations

MAX_DOUBLINGS = 64
"""No first wait is short enough for more; floats end at 1023, which an outage of a quarter of an hour reaches."""


def doubled(first_s: float, last_s: float, num_times: int) -> float:
    """Seconds: `first_s`, doubled so many times, at most `last_s`."""
    return min(last_s, first_s * 2.0 ** min(num_times, MAX_DOUBLINGS))
