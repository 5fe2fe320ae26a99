"""A chain of drafted tokens that the ratio rule judges, and what its drafter claims to have drawn them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.acceptance import Drafted, claimed_row
from outrider.core.params import SamplingParams

LEAST_LOGPROB = -64.0
"""Below the log-probability that is left of some token, if one was refused by more than rounding: a uniform has 53
bits, and fewer than 2**32 tokens share what is left."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Describes a chain of drafted tokens, and the rows of logits that judge it."""

    drafted: Sequence[Drafted]
    """Drafted tokens, all within the vocabulary. If there are none, only the next token is drawn."""
    first_row: int
    """Index of the first token's row. The other rows follow it, and then one for the token after the chain."""
    sampling: SamplingParams
    """Parameters of the generation; temperature above 0."""
    first_output_index: int
    """Number of tokens that the generation put out before the chain."""


def claims(drafted: Drafted, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns what is subtracted from p where a token was refused: token ids, each once, and their q. The refused token
    is among them, with a q above any p."""
    row = claimed_row(drafted)
    token_ids = np.array(row.token_ids, dtype=np.int64)
    shares = np.array(row.weights, dtype=np.float64)
    shares /= row.total
    shares[token_ids == drafted.token_id] = 2.0
    # Unsigned: an id below 0 becomes a large one.
    unsigned = token_ids.view(np.uint64)
    if unsigned.max() >= vocab_size:
        # Rows come from another process, and may name tokens that the target does not have.
        token_ids, shares = token_ids[unsigned < vocab_size], shares[unsigned < vocab_size]
    return token_ids, shares
