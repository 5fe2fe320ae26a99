"""Computes a link's delay, jitter, loss and rate. Pure: the clock and the random numbers are the caller's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

BITS_PER_MBIT = 1e6
_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "loss": ("in [0, 1]", lambda value: 0 <= value <= 1),
}
_ANY_NUMBER = (">= 0, a number", lambda value: value >= 0)


class BadSetting(ValueError):
    """A setting of a link has a wrong value. The message names the setting, the rule and the value."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Holds the settings of a link. Up is towards the side that is dialled. Raises BadSetting."""

    delay_ms: float = 0.0
    """Delay in each direction, in milliseconds."""
    jitter_ms: float = 0.0
    """Most extra delay, in milliseconds; each packet gets a random part of it. Never reorders."""
    rate_up_mbit: float = 0.0
    """Most megabits a second towards the dialled side; 0 means no limit."""
    rate_down_mbit: float = 0.0
    """Most megabits a second back from it; 0 means no limit."""
    loss: float = 0.0
    """Part of the packets that is lost, in each direction."""

    def __post_init__(self) -> None:
        for field in fields(self):
            rule, is_right = _RULES.get(field.name, _ANY_NUMBER)
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not is_right(value):
                raise BadSetting(f"{field.name} must be {rule}, got {value!r}")


class LinkDirection:
    """Computes when bytes that enter one direction of a link come out. Times are seconds of any monotonic clock.

    Bytes enter one after the other, as fast as the rate allows; then all of them travel for the delay and a part of the
    jitter. Bytes that entered first come out first, also when the settings change in between.
    """

    def __init__(self, chance: Callable[[], float], max_queue_s: float = math.inf) -> None:
        """
        Args:
            chance: Returns a new random number in [0, 1) at each call.
            max_queue_s: Packets that would wait longer for their turn to enter are lost, as at a router.
        """
        self.delay_s = self.jitter_s = self.loss = 0.0
        self.rate_bits = 0.0
        """Bits a second; 0 means no limit."""
        self.num_bytes = 0
        """Bytes that have entered."""
        self.num_lost = 0
        """Packets that were lost."""
        self._chance, self._max_queue_s = chance, max_queue_s
        # Before any clock begins: the first bytes find the line free.
        self._is_free_at = self._last_due = -math.inf

    def use(self, settings: LinkSettings, rate_mbit: float) -> None:
        """Changes the settings; bytes that have entered come out as before."""
        self.delay_s, self.jitter_s, self.loss = settings.delay_ms / 1e3, settings.jitter_ms / 1e3, settings.loss
        self.rate_bits = rate_mbit * BITS_PER_MBIT
        # Without a limit nothing queues: a backlog under the old rate must not hold up the bytes that come now.
        if not self.rate_bits:
            self._is_free_at = -math.inf

    def enter(self, now: float, num_bytes: int) -> float | None:
        """Returns the time at which bytes that enter now come out; None if they are lost."""
        entered = max(now, self._is_free_at)
        if entered - now > self._max_queue_s or (self.loss and self._chance() < self.loss):
            self.num_lost += 1
            return None
        # The line is taken for as long as these bytes need, and only then does the delay begin.
        if self.rate_bits:
            entered = self._is_free_at = entered + num_bytes * 8 / self.rate_bits
        self.num_bytes += num_bytes
        jitter = self.jitter_s * self._chance() if self.jitter_s else 0.0
        # Never before what entered earlier: neither jitter nor a shorter delay may let bytes overtake others.
        self._last_due = max(self._last_due, entered + self.delay_s + jitter)
        return self._last_due


def settings_from(known: LinkSettings, changes: dict[str, Any]) -> LinkSettings:
    """Returns the settings with some of them changed. Raises BadSetting, also for unknown names."""
    names = {field.name for field in fields(LinkSettings)}
    if unknown := sorted(changes.keys() - names):
        raise BadSetting(f"{unknown[0]} is no setting (there are: {', '.join(sorted(names))})")
    return LinkSettings(**{name: changes.get(name, getattr(known, name)) for name in names})


_HELP = {
    "delay_ms": "delay each way, in milliseconds",
    "jitter_ms": "at most so much more, in milliseconds; never reorders",
    "rate_up_mbit": "megabits a second towards the side that is dialled; 0 = no limit",
    "rate_down_mbit": "megabits a second on the way back; 0 = no limit",
    "loss": "part of the packets that is lost, each way",
}


def add_settings(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Adds a flag for each setting of a link except those in `without`."""
    for field in fields(LinkSettings):
        if field.name not in without:
            parser.add_argument(f"--{_dashed(field.name)}", type=float, default=field.default, help=_HELP[field.name])


def settings_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> LinkSettings:
    """Returns the settings in the flags. A wrong one ends the process with status 2 and a message that names it."""
    # A proxy has no --loss.
    names = [field.name for field in fields(LinkSettings) if hasattr(options, field.name)]
    try:
        return LinkSettings(**{name: getattr(options, name) for name in names})
    except BadSetting as error:
        name, _, rule = str(error).partition(" ")  # the message begins with the setting's name
        parser.error(f"--{_dashed(name)} {rule}")


def flags_of(settings: LinkSettings) -> list[str]:
    """Returns the flags for these settings; those that are 0 are left out."""
    given = [(field.name, getattr(settings, field.name)) for field in fields(settings)]
    return [word for name, value in given if value for word in (f"--{_dashed(name)}", str(value))]


def _dashed(name: str) -> str:
    return name.replace("_", "-")
