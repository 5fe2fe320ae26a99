"""The family of pairs that predictions are checked on: the demo pair, and what can be made of it."""

from __future__ import annotations

from outrider_bench.experiment import DRAFT, DRAFT_UNTRAINED, TARGET
from outrider_bench.suites.pair.study import Pair

FAMILY = (
    Pair("as is", TARGET, DRAFT),
    # Inflated drafts say what the small one says: replayed with that, a hundred settings take seconds, not hours.
    Pair("slower draft", TARGET, "demo/draft-c5", stand_in=DRAFT),
    Pair("larger target", "demo/target-300m", DRAFT),
    Pair("draft of the target's size", TARGET, "demo/draft-100m", stand_in=DRAFT),
    Pair("untrained draft", TARGET, DRAFT_UNTRAINED),
    Pair("target as its own draft", TARGET, TARGET, stand_in="demo/target"),
)
"""Pairs from good to useless: fast and right, slow, cheaper beside the target, as slow as it, never right, always."""
