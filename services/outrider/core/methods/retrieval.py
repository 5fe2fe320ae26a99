"""`retrieval`: no draft model; continuations are looked up."""

from __future__ import annotations

from outrider.core.speculation import Method

METHOD = Method(
    "retrieval", "no draft model: phrases found in earlier text", "#009E73", "retrieval", always_retrieves=True
)
