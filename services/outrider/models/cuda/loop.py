"""Chains of a draft model, several steps in one graph: each step's input is the best token that the step before has
found.

Everything else about a step is known before the first step runs: its positions, its places in the pool, its noise. So
the host lays out all steps at once and copies them in one go. On the device a step only writes its tokens to the next
one's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.cuda.graphs import Capture, Forwards, Results, warn_not_captured
from outrider.models.cuda.inputs import LOOP_LENS, MAX_LOOP_ROWS, Inputs, Ints, Shape, parts_of, share_work_of_steps
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_steps, write_rows
from outrider.models.draws import Best
from outrider.models.packing import Segment, check_segments

log = structlog.get_logger(__name__)


class DraftLoop:
    """Runs chains of several sessions for several steps. All calls come from the thread of the forwards."""

    def __init__(
        self, forwards: Forwards, best_tokens: Callable[[Tensor, Tensor, int], Tensor], capture: Capture | None
    ) -> None:
        """
        Args:
            forwards: Run the steps, in the same shapes as without a loop.
            best_tokens: Draws; see `outrider.models.cuda.draws`.
            capture: Captures graphs. None runs the same functions one kernel after the other.
        """
        self._forwards, self._best_tokens = forwards, best_tokens
        self._shapes = [shape for shape in forwards.shapes if shape.rows <= MAX_LOOP_ROWS]
        # A session has one row or two in the first step, and one in later steps: the next smaller shape is often enough
        # for those.
        self._behind = {shape: self._shapes[max(0, index - 1) : index + 1] for index, shape in enumerate(self._shapes)}
        self._steps = {
            (shape, behind, length): _Steps(forwards, behind, length)
            for shape in self._shapes
            for behind in self._behind[shape]
            for length in LOOP_LENS
        }
        self._replays: dict[tuple[Shape, Shape, int], Callable[[], Results]] = {}
        if capture is not None:
            with forwards.on_device():
                self._capture_all(capture)

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        # The largest first: the others reuse its memory.
        for key, steps in reversed(self._steps.items()):
            shape, behind, length = key
            self._forwards.packer.begin(shape)
            steps.clear()
            self._forwards.packer.finish([])
            try:
                self._replays[key] = capture(partial(self._compute, shape, steps))
            except RuntimeError as error:
                self._replays.clear()
                warn_not_captured(error, rows=shape.rows, steps=length)
                return
            log.info("graphs.captured", rows=shape.rows, rows_behind=behind.rows, steps=length)

    def _compute(self, shape: Shape, steps: _Steps) -> Results:
        """Computes the best tokens of all steps: int32 [steps, 2, rows of the later steps, MAX_NUM_BEST], ids and bits
        of scores."""
        forwards, first = self._forwards, self._forwards.inputs[shape]
        forwards.steps.move(first)
        found: list[Tensor] = []
        for number, inputs in enumerate([first, *steps.inputs]):
            if found:
                # Padding rows, and rows whose best token is not known, get any token: their results are ignored.
                inputs.token_ids.copy_(found[-1][0, :, 0].clamp(0, forwards.vocab_size - 1))
            # The first step, too, has no more rows that are drawn from: one for each session.
            logits = forwards.compute(inputs)[: steps.num_rows]
            found.append(self._best_tokens(logits, steps.words[number], MAX_NUM_BEST))
        return (torch.stack(found),)

    @torch.inference_mode()
    def run(
        self,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> list[list[Best | None]]:
        """Grows a chain after every segment; see `Runner.draft`."""
        check_segments(segments)
        if not all(segment.is_chain for segment in segments):
            raise ValueError("a step follows another in a chain alone")
        found: list[list[Best | None]] = []
        with self._forwards.on_device():
            while len(found) < len(segments):
                first = len(found)
                shape, last = self._fitting(segments, first)
                some = slice(first, last)
                behind = next(each for each in self._behind[shape] if each.rows >= last - first)
                key = shape, behind, length
                steps = self._steps[key]
                last = first + self._lay_out(shape, steps, segments[some], params[some], first_indices[some])
                replay = self._replays.get(key)
                (best,) = self._compute(shape, steps) if replay is None else replay()
                # Waits for the device: the host's buffers may be written again from here on.
                found += map(list, zip(*best_of_steps(self._read(best[:, :, : last - first])), strict=True))
                self._forwards.pool.moves.clear()
        for segment in segments:
            cache = segment.cache
            cache.append(range(cache.length, cache.length + len(segment.token_ids)))
        return found

    def _read(self, best: Tensor) -> Tensor:
        """Waits for the device, and returns its results on the host."""
        return best.cpu()

    def _fitting(self, segments: Sequence[Segment], first: int) -> tuple[Shape, int]:
        """Returns the smallest shape for segments from `first` on, and the number of the segment that no longer
        fits."""
        num_rows, last, most = 0, first, self._shapes[-1].rows
        while last < len(segments) and num_rows + len(segments[last].token_ids) <= most:
            num_rows += len(segments[last].token_ids)
            last += 1
        if last == first:
            raise ValueError(f"a chain may begin with at most {most} rows, got {len(segments[first].token_ids)}")
        return next(shape for shape in self._shapes if shape.rows >= num_rows), last

    def _lay_out(
        self,
        shape: Shape,
        steps: _Steps,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
    ) -> int:
        """Fills the inputs of all steps, and returns how many of the segments fitted."""
        forwards, packer, length = self._forwards, self._forwards.packer, steps.length
        for segment in segments:
            segment.cache.reserve(segment.cache.length + len(segment.token_ids) + length - 1)
        forwards.begin(shape)
        wanted = []
        for segment in segments:
            start, count = segment.cache.length, len(segment.token_ids)
            # Alone, a session of any length fits.
            if not packer.add(segment, range(start, start + count), 0, count, num_ahead=length - 1):
                break
            wanted.append(packer.num_rows - 1)
        count = len(wanted)
        steps.fill(segments[:count], packer.tables, params[:count], first_indices[:count])
        packer.finish(wanted)
        return count


class _Steps:
    """Holds the inputs of the steps after the first one, and how the rows of all steps are drawn from. Both lie in
    front of the inputs of the first step, and go to the device with them."""

    def __init__(self, forwards: Forwards, shape: Shape, length: int) -> None:
        """
        Args:
            forwards: Run the steps.
            shape: Shape of the steps after the first one.
            length: Number of steps, including the first one.
        """
        self._packer, self._pool, self._shape = forwards.packer, forwards.pool, shape
        self._vocab_size = forwards.vocab_size
        self.length = length
        """Number of steps, including the first one."""
        self.num_rows = shape.rows
        """Rows that are drawn from in each step."""
        self._count, self._num_words = shape.num_loop(length), length * shape.rows * ROW_WORDS
        device = self._packer.front(self._count)
        self.words = device[: self._num_words].view(length, shape.rows, ROW_WORDS)
        """int32 [steps, rows, ROW_WORDS]."""
        starts = range(self._num_words, self._count, shape.num_fixed)
        self.inputs = [Inputs(device[start:], shape, self._packer.buffer) for start in starts]
        """Inputs of the steps after the first one."""
        self._taken: dict[int, tuple[npt.NDArray[Any], dict[str, Ints]]] = {}
        """Views of host memory that `_take` returns, by the buffer that is filled."""
        self._row_numbers = np.arange(self.num_rows, dtype=np.int32)
        # Padding rows are drawn from without noise.
        self._nobodys = np.array((1.0, (0, 0), 0.0, self._vocab_size, -np.inf, 0), dtype=ROW)

    def _take(self) -> tuple[npt.NDArray[Any], dict[str, Ints]]:
        """Returns the host memory to fill, reset to padding rows because other loops have written there: `ROW` [steps,
        rows], and the parts of the inputs, whose first dimension is that of the steps after the first one."""
        array, turn = self._packer.take_front(self._count), self._packer.turn
        if turn not in self._taken:
            rows = array[: self._num_words].view(ROW).reshape(self.length, self.num_rows)
            self._taken[turn] = rows, parts_of(array[self._num_words :].reshape(self.length - 1, -1), self._shape)
        rows, parts = self._taken[turn]
        rows[:] = self._nobodys
        parts["positions"][:], parts["places"][:], parts["num_work"][:] = 0, self._pool.num_slots, 0
        parts["row_list"][:] = parts["wanted"][:] = self._row_numbers
        return rows, parts

    def clear(self) -> None:
        """Lays out steps without a row."""
        self._take()

    def fill(
        self,
        segments: Sequence[Segment],
        tables: Sequence[int],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
    ) -> None:
        """Lays out the steps after segments whose tables begin at these indices into the buffer."""
        rows, parts = self._take()
        count, num_behind = len(segments), self.length - 1
        write_rows(rows[:, :count], params, first_indices, self._vocab_size)
        starts = [segment.cache.length + len(segment.token_ids) for segment in segments]
        places = [each.cache.chain_places(start, num_behind) for each, start in zip(segments, starts, strict=True)]
        positions = np.add.outer(np.arange(num_behind), starts)
        parts["positions"][:, :count] = positions
        parts["places"][:, :count] = np.array(places).T
        tiles = parts["tiles"][:, :count]
        tiles[..., 0], tiles[..., 1], tiles[..., 2], tiles[..., 4] = self._row_numbers[:count], 1, tables, 0
        # Everything that a row sees is below the root.
        tiles[..., 3] = tiles[..., 5] = positions + 1
        share_work_of_steps(parts, count)
