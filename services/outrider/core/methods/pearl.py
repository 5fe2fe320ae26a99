"""`pearl`: the draft model goes on with its chain while the target verifies (Liu et al. 2024)."""

from __future__ import annotations

from outrider.core.methods.chain import pearl_growth
from outrider.core.speculation import Method

METHOD = Method(
    "pearl",
    "the draft model goes on with its chain while the model checks",
    "#E69F00",
    "wire",
    grow=pearl_growth,
    samples=True,
)
