"""A draft that a device is still at, and that a target on the same device can verify without the host between them.

A target's forward needs the drafted tokens on the device alone. So it can be asked for while the draft model works, and
begins as soon as the tokens are there; what the host makes of the draft is made meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.tree import TokenId

TokensOnDevice = Tensor
"""Whole numbers [tokens]: token ids, below 0 where the host has to draw."""
MAX_WAIT_S = 0.005
"""Longest that a target waits for the draft model's thread, which may be at something else."""
NUM_BEST = 3
"""Tokens of each step that a target may be asked about: the one that the chain goes on with, and others beside it."""


class LoopTokens(NamedTuple):
    """Holds the tokens of chains on a device, which may still be at them."""

    token_ids: Tensor
    """int32 [1 + steps, chains, NUM_BEST]: the token that a chain begins behind, then the best ones of each step. Of
    chains that are nobody's some tokens; below 0 where the host has to draw."""
    wait: Callable[[], object]
    """Has what the calling thread asks the device for from now on wait for them. The thread does not wait."""


class ChainStart(NamedTuple):
    """Names what a chain begins behind."""

    session_id: str
    base_len: int
    """Committed tokens of the session."""


Found = Sequence[Sequence[Sequence[TokenId]]]
"""For each chain and step the best tokens, the one that the chain goes on with first. A chain ends where the host has
to draw."""
Commit = Callable[["PendingDraft", Mapping[int, Sequence[TokenId]]], object]


class PendingDraft:
    """A draft of some sessions, one chain each. The draft model's thread makes it, and ends it when the host has the
    tokens; before that the target's thread may claim it, to verify it, and says then what it has kept."""

    def __init__(self, tokens: LoopTokens, starts: Sequence[ChainStart], commit: Commit) -> None:
        """
        Args:
            tokens: The chains, those of the sessions first.
            starts: One for each session.
            commit: Tells the draft model's thread what was kept. It calls `has_gone_on` when its device was asked for
                what comes behind that.
        """
        self.tokens, self.starts, self._commit = tokens, starts, commit
        self._found: Found = ()
        self._seen: Found | None = None
        self.ended_at = 0.0
        """Time of the end, by `time.perf_counter`."""
        self._lock = threading.Lock()
        self._is_claimed = False
        self._ended = threading.Event()
        self._gone_on = threading.Event()

    @property
    def num_steps(self) -> int:
        """Tokens of each chain."""
        return len(self.tokens.token_ids) - 1

    def place(self, chain: int, step: int, rank: int = 0) -> int:
        """Returns where a token of a chain is among all tokens.

        Args:
            chain: Number of the chain.
            step: Number of the step, from 1 on. 0 is the token that the chain begins behind.
            rank: 0 for the best token of the step.
        """
        return (step * self.tokens.token_ids.shape[1] + chain) * NUM_BEST + rank

    def tokens_with(self, others: Sequence[TokenId], vocab_size: int) -> TokensOnDevice:
        """Returns all tokens of the draft, and others behind them. What the calling thread asks the device for from now
        on waits for the draft. A token that is not below vocab_size is some other one: its rows mean nothing."""
        drafted = self.tokens.token_ids
        # Before the device waits: a copy from memory that is not pinned is waited for here.
        on_device = torch.tensor(others, dtype=drafted.dtype).to(drafted.device) if others else None
        self.tokens.wait()
        # The draft model's vocabulary may be padded to more.
        token_ids = drafted.flatten().clamp(max=vocab_size - 1)
        return token_ids if on_device is None else torch.cat([token_ids, on_device])

    def claim(self) -> bool:
        """Takes it to verify it. Returns False if it has ended: then the draft is told of as any other."""
        with self._lock:
            self._is_claimed = not self._ended.is_set()
            return self._is_claimed

    def end(self, found: Found) -> bool:
        """Takes what the host has found; returns True if it was claimed: then the draft goes no further."""
        with self._lock:
            self._found, self.ended_at = found, time.perf_counter()
            self._ended.set()
            return self._is_claimed

    def found(self) -> Found:
        """Returns what the host has found, always the same. It is waited for a little: a target that has verified the
        draft may look before the other thread had its turn. Empty if it is not there then."""
        if self._seen is None:
            self._ended.wait(MAX_WAIT_S)
            self._seen = self._found
        return self._seen

    def go_on(self, kept: Mapping[int, Sequence[TokenId]]) -> None:
        """Has the draft model go on from what the target has kept; returns when its device was asked for that, so that
        the two threads do not take the interpreter from each other.

        Args:
            kept: The tokens that each chain's session commits, by its number. Of chains that are not named nothing is
                kept yet.
        """
        self._commit(self, kept)
        self._gone_on.wait(MAX_WAIT_S)

    def has_gone_on(self) -> None:
        """Ends the wait of `go_on`."""
        self._gone_on.set()
