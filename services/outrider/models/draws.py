"""Draws from rows of logits: descriptions of draws, their results, and copies on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.chains import Chain

Best = tuple[list[int], list[float]]
"""The best token ids of a row, and their scores."""


@dataclass(slots=True)
class RowDraws:
    """Describes how rows of a forward's logits are drawn from, so that the forward can bring that to the device."""

    params: Sequence[SamplingParams]
    """One for each row that is drawn from."""
    output_indices: Sequence[int]
    """For each of these rows, how many tokens the generation put out before the one that is drawn there."""
    on_device: Tensor | None = None
    """The same data as the device reads it, if the forward had room for it. The next forward overwrites it."""

    @property
    def is_greedy(self) -> bool:
        """True if no row needs more than its best token. The device then needs no description."""
        return all(p.is_greedy for p in self.params)

    def chosen(self, is_chosen: Sequence[bool]) -> RowDraws:
        """Returns the draws of some of the rows, as if no forward had been told of them yet."""
        return RowDraws(list(compress(self.params, is_chosen)), list(compress(self.output_indices, is_chosen)))

    def at(self, rows: Sequence[int]) -> RowDraws:
        """Returns the draws of some rows, by their numbers, likewise."""
        return RowDraws([self.params[row] for row in rows], [self.output_indices[row] for row in rows])


class HostCopy:
    """Copies a tensor to the host after all work that was queued on its device so far. Reading the copy does not wait
    for work that is queued later on a CUDA device."""

    def __init__(self, tensor: Tensor) -> None:
        """Asks for the copy, on the stream that the calling thread works on."""
        # From a GPU to pinned memory: any other copy would block here.
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._wait: Callable[[], object] = lambda: None
        if tensor.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tensor.device))
            self._wait = event.synchronize
        elif tensor.device.type not in ("cpu", "meta"):
            self._wait = torch.get_device_module(tensor.device).synchronize

    def wait(self) -> Tensor:
        """Waits for the copy, and returns it."""
        self._wait()
        return self._tensor


class DrawnTokens:
    """Holds the tokens that were drawn, one for each row. A device may still be drawing."""

    def __init__(self, on_device: Tensor, redraw: Callable[[Sequence[int]], Sequence[int]] | None = None) -> None:
        """
        Args:
            on_device: Whole numbers [rows], on the device that draws. Below 0 for rows that it leaves to the host.
            redraw: Draws for these rows on the host. None means that no row is left to it.
        """
        self.on_device = on_device
        """Whole numbers [rows]: the tokens, on the device that drew them. `unsettled` rows are below 0."""
        self.unsettled: Sequence[int] = ()
        """Rows that the host had to draw for. Valid after `wait`."""
        self._copy, self._redraw = HostCopy(on_device), redraw

    def wait(self) -> list[int]:
        """Waits for the device, and returns a token id for each row."""
        token_ids: list[int] = self._copy.wait().tolist()
        if self._redraw is not None and min(token_ids, default=0) < 0:
            self.unsettled = [row for row, token_id in enumerate(token_ids) if token_id < 0]
            for row, token_id in zip(self.unsettled, self._redraw(self.unsettled), strict=True):
                token_ids[row] = token_id
        return token_ids


class Draws(Protocol):
    """Finds the best tokens of `logits / temperature + noise` on one kind of device. Used by one thread.

    Logits are float32 [rows, vocab]. `draws` says how each row is drawn from; greedy rows have no noise and no filters.
    """

    def begin(self, logits: Tensor, draws: RowDraws) -> DrawnTokens:
        """Begins to find the best token of every row, without waiting for it."""

    def best(self, logits: Tensor, draws: RowDraws, k: int) -> list[Best]:
        """Finds the k best tokens of every row that its filters allow, and their scores, in falling order. If a row has
        fewer, the others have minus infinity, or are missing."""

    def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
        """Begins to judge chains under the ratio rule, without waiting for it. Returns a function that waits and
        returns for each chain what `outrider.models.acceptance.judge` does, or None if it leaves the chain to the
        host."""
