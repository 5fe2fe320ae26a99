"""The hash by which services know that they mean the same tokens by the same ids."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """Computes the hex SHA-256 of everything in a fast tokenizer of transformers that token ids depend on."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Settings of use: tokenizers that give the same ids may differ in them.
    for setting in ("padding", "truncation", "version"):
        state.pop(setting, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
