"""Contenders and settings that parts by the clock and parts in simulated time have in common."""

from __future__ import annotations

from typing import Any

from outrider.core.methods import METHODS
from outrider_bench.experiment import Contender, contender

TIERS = ("PRIOR", "DYNAMIC", "SHARED", "REJECTED", "RING")
CHAIN = "chain"
NO_OWN_TEXT = "no dynamic, no rejected"


def without(*tiers: str) -> dict[str, Any]:
    """Return the parameters of double that leave tiers out."""
    return {"tiers": [f"SOURCE_{tier}" for tier in TIERS if tier not in tiers]}


# DOUBLE, section 5.3: without draft-side and without target-side retrieval (Figure 5), without the prior (Table 3);
# appendix D.5, Table 9: without rejected tokens.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no draft retrieval": {"draft_retrieval": False},
    "no target retrieval": {"target_retrieval": False},
    "no prior": without("PRIOR"),
    "no rejected tier": without("REJECTED"),
    "no dynamic tier": without("DYNAMIC"),
    NO_OWN_TEXT: without("DYNAMIC", "REJECTED"),
}
"""Double without some of its parts. What was refused and what the target said instead is in the session's own text too,
the dynamic tier: so the rejected tier is also judged where that one is missing."""

ALL_METHODS: tuple[Contender, ...] = (
    *(contender(method.name) for method in METHODS.values() if not method.needs_datastore),
    contender("best-first", CHAIN, rows="ROWS_CHAIN"),
)
"""Contenders of the table of methods. spacelike, which proposes nothing in a new service, has a separate part."""
TRAINLESS: dict[str, dict[str, Any]] = {
    "token-recycling": {"rows": "ROWS_TREE", "retrieval_params": {"sources": ["SOURCE_RECYCLED"]}},
    "ngram-pool": {"rows": "ROWS_TREE", "retrieval_params": {"sources": ["SOURCE_POOL"]}},
    "rest": {"rows": "ROWS_TREE", "retrieval_params": {"sources": ["SOURCE_PRIOR"]}},
}
"""Settings of retrieval that stand for a paper's method without a draft model: Token Recycling, the pool of Lookahead
decoding and Ouroboros, REST."""
BATCH_METHODS = tuple(one for one in ALL_METHODS if not one.setting)
"""Contenders of the part with several generations at once: each method in its usual setting."""
