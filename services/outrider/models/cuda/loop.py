"""Chains of a draft model, several steps in one graph: each step's row is the best token that the one before has found.

All else of a step is known before the first has run: its positions, its places in the pool, its noise. So the host lays
out all steps at once and copies them in one go. On the device a step only writes its tokens to the next one's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from outrider.core.noise import row_key
from outrider.core.params import SamplingParams
from outrider.models.contenders import Best
from outrider.models.cuda.graphs import Capture, Forwards, Results, warn_not_captured
from outrider.models.cuda.inputs import Inputs, Shape, parts_of, share_work
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_rows, write_rows
from outrider.models.packing import Segment, check_segments
from outrider.models.sampling import temperatures

log = structlog.get_logger(__name__)

LOOP_LENS = (4, 8)
"""Steps of a loop. Each number has graphs of its own."""
MAX_LOOP_ROWS = 128
"""Most rows of a loop's forwards."""


class DraftLoop:
    """Runs chains of several sessions for several steps. All calls come from one thread, that of the forwards."""

    def __init__(
        self,
        forwards: Forwards,
        best_tokens: Callable[[Tensor, Tensor, int], Tensor],
        vocab_size: int,
        capture: Capture | None,
    ) -> None:
        """
        Args:
            forwards: Run the steps; of the same shapes as without a loop.
            best_tokens: Draws; see `outrider.models.cuda.draws`.
            vocab_size: Width of the logits.
            capture: Captures graphs. None runs the same functions one kernel after the other.
        """
        self._forwards, self._best_tokens, self._vocab_size = forwards, best_tokens, vocab_size
        shapes = [shape for shape in forwards.shapes if shape.rows <= MAX_LOOP_ROWS]
        self._steps = {shape: _Steps(forwards, shape, vocab_size) for shape in shapes}
        self._replays: dict[tuple[Shape, int], Callable[[], Results]] = {}
        if capture is not None:
            with forwards.on_device():
                self._capture_all(capture)

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        # The largest first: the others use its memory.
        for shape in reversed(self._steps):
            for length in reversed(LOOP_LENS):
                self._forwards.packer.begin(shape)
                self._forwards.packer.finish([])
                self._steps[shape].copy(length)
                try:
                    compute = self._capturable(shape, length)
                    self._replays[shape, length] = capture(compute)
                except RuntimeError as error:
                    self._replays.clear()
                    warn_not_captured(error, rows=shape.rows, steps=length)
                    return
                log.info("graphs.captured", rows=shape.rows, steps=length)

    def _capturable(self, shape: Shape, length: int) -> Callable[[], Results]:
        return lambda: self._compute(shape, length)

    def _compute(self, shape: Shape, length: int) -> Results:
        """Computes the best tokens of all steps, int32 [steps, 2, rows, MAX_NUM_BEST]: ids, and bits of scores."""
        forwards, steps = self._forwards, self._steps[shape]
        forwards.steps.move(forwards.inputs[shape])
        found: list[Tensor] = []
        for number, inputs in enumerate([forwards.inputs[shape], *steps.inputs[: length - 1]]):
            if found:
                # Of rows that are nobody's, or whose best token is not known, some token: nothing is made of it.
                inputs.token_ids.copy_(found[-1][0, :, 0].clamp(0, self._vocab_size - 1))
            found.append(self._best_tokens(forwards.compute(inputs), steps.words[number], MAX_NUM_BEST))
        return (torch.stack(found),)

    @torch.inference_mode()
    def run(
        self, segments: Sequence[Segment], params: Sequence[SamplingParams], first_indices: Sequence[int], length: int
    ) -> list[list[Best | None]]:
        """Grows a chain behind every segment; see `Runner.draft`."""
        check_segments(segments)
        if not all(segment.is_chain for segment in segments):
            raise ValueError("a step follows another in a chain alone")
        found: list[list[Best | None]] = []
        with self._forwards.on_device():
            while len(found) < len(segments):
                first = len(found)
                shape, last = self._fitting(segments, first)
                some = slice(first, last)
                last = first + self._lay_out(shape, segments[some], params[some], first_indices[some], length)
                replay = self._replays.get((shape, length))
                (best,) = self._compute(shape, length) if replay is None else replay()
                # Waits for the device: what was copied to it may be written again from here on.
                of_steps = [best_of_rows(of_step, MAX_NUM_BEST) for of_step in best[:, :, : last - first].cpu()]
                found += [[of_step[row] for of_step in of_steps] for row in range(last - first)]
                self._forwards.pool.moves.clear()
        for segment in segments:
            cache = segment.cache
            cache.append(range(cache.length, cache.length + len(segment.token_ids)))
        return found

    def _fitting(self, segments: Sequence[Segment], first: int) -> tuple[Shape, int]:
        """Returns the smallest shape for segments from `first` on, and behind which of them it is full."""
        num_rows, last, most = 0, first, max(shape.rows for shape in self._steps)
        while last < len(segments) and num_rows + len(segments[last].token_ids) <= most:
            num_rows += len(segments[last].token_ids)
            last += 1
        if last == first:
            raise ValueError(f"a chain may begin with at most {most} rows, got {len(segments[first].token_ids)}")
        return next(shape for shape in self._steps if shape.rows >= num_rows), last

    def _lay_out(
        self,
        shape: Shape,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> int:
        """Fills the inputs of all steps, and returns for how many of the segments there was room."""
        forwards, packer = self._forwards, self._forwards.packer
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
        packer.finish(wanted)
        count = len(wanted)
        self._steps[shape].fill(segments[:count], packer.tables, params[:count], first_indices[:count], length)
        return count


class _Steps:
    """Holds the inputs of the steps behind the first one, and how the rows of all steps are drawn from."""

    def __init__(self, forwards: Forwards, shape: Shape, vocab_size: int) -> None:
        buffer = forwards.packer.buffer
        self._pool, self._vocab_size = forwards.pool, vocab_size
        num_words, num_steps = shape.rows * ROW_WORDS, max(LOOP_LENS)
        # Words first: float64 among them must lie at even places.
        size = num_steps * num_words + (num_steps - 1) * shape.num_fixed
        self._ends = [length * shape.num_fixed for length in range(num_steps)]
        self._num_words = num_steps * num_words
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=buffer.is_cuda)
        self._device = torch.zeros_like(self._host, device=buffer.device)
        self.words = self._device[: self._num_words].view(num_steps, shape.rows, ROW_WORDS)
        """int32 [steps, rows, ROW_WORDS]."""
        starts = [self._num_words + start for start in self._ends[:-1]]
        self.inputs = [Inputs(self._device[start:], shape, buffer) for start in starts]
        """Inputs of the steps behind the first one."""
        array = self._host.numpy()
        self._rows = array[: self._num_words].view(ROW).reshape(num_steps, shape.rows)
        self._rows["top_p"], self._rows["top_k"], self._rows["log_min_p"] = 1.0, vocab_size, -np.inf
        self._parts = [parts_of(array[start:], shape) for start in starts]
        for parts in self._parts:
            # Those of nobody: what they write goes where nothing is read.
            parts["places"].fill(self._pool.num_slots)
            parts["row_list"][:] = parts["wanted"][:] = np.arange(shape.rows)

    def copy(self, length: int) -> None:
        """Copies the inputs of so many steps to the device."""
        end = self._num_words + self._ends[length - 1]
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def fill(
        self,
        segments: Sequence[Segment],
        tables: Sequence[int],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> None:
        """Lays out the steps behind segments whose tables begin at these numbers of the buffer, and copies them."""
        count, rows = len(segments), self._rows[:length, : len(segments)]
        keys = [
            [row_key(p.seed, i + step) for p, i in zip(params, first_indices, strict=True)] for step in range(length)
        ]
        write_rows(rows[0], params, temperatures(params), keys[0], self._vocab_size)
        rows[1:] = rows[0]
        rows["key"] = keys
        # Left by others: they are drawn from without noise.
        self._rows["temperature"][:length, count:] = 0.0
        starts = np.array([segment.cache.length + len(segment.token_ids) for segment in segments])
        places = np.stack(
            [each.cache.places(start + np.arange(length - 1)) for each, start in zip(segments, starts, strict=True)]
        )
        for step, parts in enumerate(self._parts[: length - 1]):
            parts["positions"][:count], parts["positions"][count:] = starts + step, 0
            parts["places"][:count], parts["places"][count:] = places[:, step], self._pool.num_slots
            tiles = parts["tiles"][:count]
            tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 4] = np.arange(count), 1, tables, 0
            # All that a row sees is below the root.
            tiles[:, 3] = tiles[:, 5] = starts + step + 1
            share_work(parts, count)
        self.copy(length)
