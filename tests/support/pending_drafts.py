"""Drafts that a target is asked to verify before the host knows them, and a runner that makes some on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.contenders import Best
from outrider.models.cuda.inputs import loop_lens
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, UNSETTLED, best_of_rows, write_rows
from outrider.models.packing import Segment
from outrider.models.pending_draft import NUM_BEST, ChainStart, Commit, LoopTokens, PendingDraft
from outrider.models.runner import Runner
from tests.support.cuda_twins import best_tokens

PATIENCE_S = 20.0
"""Longest that one thread waits for another one here: a test that takes so long has failed."""


def pending_draft(
    begins: Sequence[int],
    chains: Sequence[Sequence[Sequence[int]]],
    starts: Sequence[tuple[str, int]],
    *,
    wait: Callable[[], object] = lambda: None,
    commit: Commit = lambda *_: None,
) -> PendingDraft:
    """A draft that a device is at.

    Args:
        begins: The token that each chain begins behind.
        chains: For each chain and step the best tokens.
        starts: Id and number of committed tokens of each session.
        wait: See `LoopTokens`.
        commit: See `PendingDraft`.
    """
    steps = [[[token_id] * NUM_BEST for token_id in begins], *zip(*chains, strict=True)]
    tokens = LoopTokens(torch.tensor(steps, dtype=torch.int32), wait)
    return PendingDraft(tokens, [ChainStart(*start) for start in starts], commit)


class LoopingRunner:
    """A draft model's runner with a loop, whose steps are forwards one after the other. Its device is at them until the
    target's engine has planned: so it depends on no thread's speed which drafts the target claims."""

    has_loop = True

    def __init__(self, runner: Runner) -> None:
        """
        Args:
            runner: Computes.
        """
        self._runner = runner
        self.is_left: Callable[[int], bool] = lambda _: False
        """Says of a row, by its number, if the host has to draw for it."""
        self._num_rows = 0
        self._looked_at, self._ended = threading.Event(), threading.Event()
        self._shown: PendingDraft | None = None
        """The draft that the device is at, if the target was told of it."""
        self.num_left = 0
        """Rows that were left to the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def make_loop(self) -> None:
        """Does nothing: there is one."""

    def loop_lens(self, num_steps: int) -> list[int]:
        """See `Runner.loop_lens`."""
        return loop_lens(num_steps)

    @torch.inference_mode()
    def draft(
        self,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
        begun: Callable[[LoopTokens], object] | None = None,
    ) -> list[list[Best | None]]:
        """See `Runner.draft`."""
        begins = torch.tensor([segment.token_ids[-1] for segment in segments], dtype=torch.int32)
        tokens = [begins[:, None].expand(-1, NUM_BEST)]
        found: list[list[Best | None]] = []
        step = list(segments)
        for number in range(length):
            best = self._best(self._runner.forward(step), params, [index + number for index in first_indices])
            tokens.append(best[0, :, :NUM_BEST])
            found.append(best_of_rows(best, MAX_NUM_BEST))
            behind = best[0, :, 0].clamp_min(0).tolist()
            step = [Segment(segment.cache, [token], 1) for segment, token in zip(segments, behind, strict=True)]
        for segment in segments:
            segment.cache.truncate(segment.cache.length - (length - 1))
        if begun is not None:
            self._show(torch.stack(tokens), begun)
        return [list(of_steps) for of_steps in zip(*found, strict=True)]

    def _best(self, logits: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> Tensor:
        rows = np.zeros(len(logits), dtype=ROW)
        write_rows(rows, params, indices, logits.shape[1])
        best = best_tokens(logits, torch.from_numpy(rows.view(np.int32).reshape(-1, ROW_WORDS)), MAX_NUM_BEST)
        for row in range(len(logits)):
            self._num_rows += 1
            if self.is_left(self._num_rows):
                best[0, row, 0] = UNSETTLED
                self.num_left += 1
        return best

    def _show(self, token_ids: Tensor, begun: Callable[[LoopTokens], object]) -> None:
        self._shown = None
        begun(LoopTokens(token_ids, self._be_waited_for))
        if self._shown is not None:
            assert self._looked_at.wait(PATIENCE_S), "the target has not planned"

    def _be_waited_for(self) -> None:
        """A CPU is at nothing by itself: the target waits until the host has the draft."""
        self._looked_at.set()
        assert self._ended.wait(PATIENCE_S), "the draft has not ended"

    def show(self, draft: PendingDraft) -> None:
        """Takes in that the target was told of a draft that the device is at."""
        self._looked_at.clear()
        self._ended.clear()
        self._shown = draft

    def look_at(self, draft: PendingDraft) -> None:
        """Takes in that the target has planned, whether it has claimed the draft or not."""
        if draft is self._shown:
            self._looked_at.set()

    def end(self, draft: PendingDraft) -> None:
        """Takes in that the host has the draft."""
        if draft is self._shown:
            self._ended.set()
