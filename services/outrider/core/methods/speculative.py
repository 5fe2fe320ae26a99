"""`speculative`: a draft model guesses a chain, and the target verifies it (Leviathan et al. 2023). The other methods
are measured against it."""

from __future__ import annotations

from outrider.core.methods.chain import speculative_growth
from outrider.core.params import Rows
from outrider.core.speculation import AS_SAMPLED, Method, Preset, Waiting

METHOD = Method(
    "speculative",
    "the draft model guesses a chain, and the model waits for it",
    "#888888",
    grow=speculative_growth,
    waiting=Waiting.IN_TURNS,
    samples=True,
    published=Preset(
        "Leviathan et al. 2023",
        fixed={**AS_SAMPLED, "retrieval": False, "rows": Rows.CHAIN},
        tunable={"num_speculative_tokens": 5},
    ),
)
