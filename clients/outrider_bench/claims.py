"""What was measured beside what was asked for: the claims of the papers, and ours."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_bench.measured import Measured

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that a measurement can confirm or not."""

    part: str
    what: str
    measured: float | None
    """None = it was not measured."""
    comparison: str = ""
    asked: float | None = None
    """What it should be, by the comparison; None = measured for comparison."""
    remark: str = ""

    @property
    def verdict(self) -> str:
        """MET, MISSED or NOT_MEASURED; nothing where nothing is asked for."""
        if self.measured is None or (self.comparison and self.asked is None):
            return NOT_MEASURED
        if self.asked is None:
            return ""
        return MET if _COMPARISONS[self.comparison](self.measured, self.asked) else MISSED

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "part": self.part,
            "what": self.what,
            "measured": self.measured,
            "comparison": self.comparison,
            "asked": self.asked,
            "verdict": self.verdict,
            "remark": self.remark,
        }


def at_least(part: str, what: str, measured: float | None, asked: float | None, remark: str = "") -> Claim:
    """It should be so much or more."""
    return Claim(part, what, measured, ">=", asked, remark)


def at_most(part: str, what: str, measured: float | None, asked: float | None, remark: str = "") -> Claim:
    """It should be so much or less."""
    return Claim(part, what, measured, "<=", asked, remark)


def above(part: str, what: str, measured: float | None, asked: float | None, remark: str = "") -> Claim:
    """It should be more."""
    return Claim(part, what, measured, ">", asked, remark)


def reported(part: str, what: str, measured: float | None, remark: str = "") -> Claim:
    """Nothing is asked for."""
    return Claim(part, what, measured, remark=remark)


def beside_the_best(
    measured: Measured, experiment: str, label: str, others: Iterable[str], temperature: float, category: str = ""
) -> tuple[float | None, str]:
    """Tokens a second by those of the fastest of the others; and who that is, and who of them was not measured."""
    ratios = {other: measured.ratio(experiment, label, other, temperature, category) for other in others}
    known = {other: ratio for other, ratio in ratios.items() if ratio is not None}
    if not known:
        return None, ""
    best = min(known, key=lambda other: known[other])
    missing = ", ".join(ratios.keys() - known.keys())
    return known[best], f"best of them: {best}" + (f"; not measured: {missing}" if missing else "")


def share_of(value: float | None, whole: float | None) -> float | None:
    """One value by another; None where one of them is missing, or the second is nothing."""
    return value / whole if value is not None and whole else None


def counts_of(claims: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many were met, missed and not measured, of claims as results.json has them."""
    verdicts = [claim["verdict"] for claim in claims]
    return {verdict: verdicts.count(verdict) for verdict in (MET, MISSED, NOT_MEASURED)}
