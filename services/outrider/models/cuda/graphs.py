"""Forwards on a GPU, in a few fixed shapes. Each is captured once as a graph and replayed for any mix of sessions."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog
import torch
from torch import Tensor

from outrider.models.cuda.inputs import MAX_DRAWS, MAX_PAIRS, MAX_SPANS, Inputs, Packer, Shape
from outrider.models.cuda.rows import ROW, ROW_WORDS, write_rows
from outrider.models.cuda.steps import FEW_ROWS, CudaSteps
from outrider.models.draws import RowDraws
from outrider.models.kv_cache import KVPool
from outrider.models.packing import Segment, check_segments, filled_in
from outrider.models.torch.products import Product

log = structlog.get_logger(__name__)

BUCKETS = (16, 32, 64, 128, 256, 512, 2048)
"""Rows of forwards that need not be exact: the smallest bucket that fits is taken."""
INVARIANT_BUCKETS = (16, 32, 64, 128, 256, 512)
"""Rows of forwards whose products are batch-invariant (`outrider.models.cuda.invariant`)."""
EXACT_ROWS = 128
"""Rows of every forward if rows are exact and a library computes the products. The library then sees one shape, and
computes each row alike."""

Results = tuple[Tensor, ...]
"""Tensors that a graph writes."""
Body = Callable[[Inputs, int | None], Tensor]
"""Computes the normed hidden states of all rows, with the given number of first layers; None means all."""
Replay = Callable[[], Results]
"""Computes again what was captured, into the same tensors."""
Capture = Callable[[Replay], Replay]
"""Turns a function into one that does the same again, into the same tensors."""
MAX_DIFFERENCE = 0.05
"""Most that results of fused products may differ from those of a library's, as a share of their length. After 28 layers
of random weights two orders of sums in bfloat16 differ by .02; a product that is a tenth too large makes .08."""


class Forwards:
    """Runs forwards whose shapes are fixed. All calls come from one thread."""

    def __init__(
        self,
        body: Body,
        head: Product,
        steps: CudaSteps,
        pool: KVPool,
        *,
        queries_per_key: int,
        max_context_len: int,
        vocab_size: int,
        buckets: Sequence[int],
        capture: Capture | None,
    ) -> None:
        """
        Args:
            body: Computes everything below the head.
            head: Computes the logits.
            steps: Those of the body's layers.
            pool: Keys and values, with scratch slots.
            queries_per_key: Query heads that share a key-value head.
            max_context_len: Most slots of a chain.
            vocab_size: Width of the logits.
            buckets: Rows of the forwards, ascending.
            capture: Captures graphs. None runs the same functions one kernel after the other.
        """
        self._body, self._head = body, head
        self.steps, self.pool, self.vocab_size, self._max_context_len = steps, pool, vocab_size, max_context_len
        self.shapes = [Shape(rows) for rows in buckets]
        """Shapes of the forwards, ascending."""
        self.packer = Packer(pool, queries_per_key, self.shapes, max_context_len)
        """Lays out the inputs of one forward at a time."""
        self.inputs = {shape: Inputs(self.packer.buffer, shape) for shape in self.shapes}
        """Inputs on the device."""
        steps.use(pool, self.shapes[-1].rows, pool.shape.num_heads * queries_per_key)
        pool.defers_moves = True
        self._replays: dict[Shape, tuple[Replay, Replay]] = {}
        """Graphs of the body and of the head: pieces of prompts do not need the second."""
        if capture is not None:
            with self.on_device():
                self._capture_all(capture)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of the forwards, ascending."""
        return tuple(shape.rows for shape in self.shapes)

    @property
    def has_graphs(self) -> bool:
        """True if the forwards are replayed graphs."""
        return bool(self._replays)

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the model's device the thread's current one, which launches go to. By default that is the first
        device."""
        device = self.pool.data.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _capture_all(self, capture: Capture) -> None:
        started = time.perf_counter()
        # The largest first: the others reuse its memory.
        for number, shape in enumerate(reversed(self.shapes), 1):
            self.packer.begin(shape)
            self.packer.finish([])
            try:
                self._replays[shape] = self._captured(shape, capture)
            except RuntimeError as error:
                self._replays.clear()
                warn_not_captured(error, rows=shape.rows)
                return
            took_s = round(time.perf_counter() - started, 1)
            log.info("graphs.captured", rows=shape.rows, graph=f"{number} of {len(self.shapes)}", took_s=took_s)

    def _captured(self, shape: Shape, capture: Capture) -> tuple[Replay, Replay]:
        if self.steps.can_fuse and shape.rows == FEW_ROWS:
            self._try_fused(shape)
        found: list[Tensor] = []

        def body() -> Results:
            found.append(self._moved_and_hidden(shape, None))
            return (found[-1],)

        replay = capture(body)
        # The head's graph reads the tensors that the last run of the body's capture wrote.
        return replay, capture(lambda: (self._logits(self.inputs[shape], found[-1]),))

    def _try_fused(self, shape: Shape) -> None:
        """Fuses products from here on, unless they fail, or a short text's results differ from those of a library's
        products."""
        cache = self.pool.new_cache()
        num_rows = min(shape.rows, self._max_context_len)
        cache.reserve(num_rows)
        self.packer.begin(shape)
        self.packer.add(
            Segment(cache, [(7 * row + 1) % self.vocab_size for row in range(num_rows)], 0),
            range(num_rows),
            0,
            num_rows,
        )
        self.packer.finish([])
        expected = self._moved_and_hidden(shape, None)[:num_rows].float()
        self.steps.is_fused = True
        try:
            found = self._moved_and_hidden(shape, None)[:num_rows].float()
            difference = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
            self.steps.is_fused = difference <= MAX_DIFFERENCE  # False for NaN
            reason = f"results of a row differ by {difference:.0%}"
        except Exception as error:  # any error of a compiler or a driver: there is another way
            self.steps.is_fused = False
            reason = (str(error) or repr(error)).splitlines()[0]
            if expected.is_cuda:
                # A fault of the device is raised again here: a faulty device computes nothing more.
                torch.cuda.synchronize(expected.device)
        finally:
            cache.clear()
        if not self.steps.is_fused:
            log.warning("products.not_fused", rows=shape.rows, reason=reason, advice="a library computes them")

    @torch.inference_mode()
    def warm(self) -> None:
        """Runs a forward of the largest shape without a row, so that the memory that it needs on the device is
        allocated."""
        with self.on_device():
            self.packer.begin(self.shapes[-1])
            self.packer.finish([])
            self._logits(self.inputs[self.shapes[-1]], self._moved_and_hidden(self.shapes[-1], None))

    def _moved_and_hidden(self, shape: Shape, num_layers: int | None) -> Tensor:
        """Moves the rows that caches keep, and computes the normed hidden states of all rows: [rows, hidden]."""
        inputs = self.inputs[shape]
        self.steps.move(inputs)
        return self._body(inputs, num_layers)

    def compute(self, inputs: Inputs) -> Tensor:
        """Computes what a forward's graphs do, without the moves: logits of the wanted rows, float32 [wanted,
        vocab_size]."""
        return self._logits(inputs, self._body(inputs, None))

    def _logits(self, inputs: Inputs, hidden: Tensor, first: int = 0) -> Tensor:
        """Computes the logits of as many wanted rows as one product has, from the `first` one on: float32 [wanted,
        vocab_size]."""
        # In exact mode, libraries see one shape here too.
        return self._head(hidden.index_select(0, inputs.wanted[first : first + inputs.shape.wanted])).float()

    def forward(
        self,
        segments: Sequence[Segment],
        num_layers: int | None = None,
        draws: RowDraws | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor | None:
        """Appends the rows of every segment to its cache, and returns the wanted logits, None if there are none; see
        `Runner.forward`. Rows that do not fit into one forward run in later ones."""
        check_segments(segments)
        for segment in segments:
            segment.cache.reserve(segment.cache.length + len(segment.token_ids))
        positions = [
            segment.position_ids or range(segment.cache.length, segment.cache.length + len(segment.token_ids))
            for segment in segments
        ]
        logits: list[Tensor] = []
        left = sum(len(segment.token_ids) for segment in segments)
        number = first = 0
        while left:
            shape = next((each for each in self.shapes if each.rows >= left), self.shapes[-1])
            with self.on_device():
                number, first, wanted = self._lay_out(shape, segments, positions, number, first)
                left -= self.packer.num_rows
                if draws is not None and not left:
                    # With the last forward, because each overwrites what an earlier one has brought.
                    self._add_draws(draws)
                logits += self._run(shape, wanted, num_layers, drawn)
        for segment, position_ids in zip(segments, positions, strict=True):
            segment.cache.append(position_ids)
        if not logits:
            return None
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def begin(self, shape: Shape) -> None:
        """Begins to lay out a forward. It first moves the rows that caches keep."""
        moves = self.pool.moves
        if len(moves) > MAX_SPANS or sum(len(old) for old, _ in moves.values()) > MAX_PAIRS:
            self.pool.move_now()
        self.packer.begin(shape)
        self.packer.move(list(moves.values()))

    def _lay_out(
        self,
        shape: Shape,
        segments: Sequence[Segment],
        positions: Sequence[Sequence[int]],
        number: int,
        first: int,
    ) -> tuple[int, int, list[int]]:
        """Fills one forward from row `first` of segment `number` on; returns where the next one begins, and the rows
        whose logits are wanted."""
        packer = self.packer
        wanted: list[int] = []
        self.begin(shape)
        while number < len(segments):
            segment = segments[number]
            num_rows = len(segment.token_ids)
            last = min(num_rows, first + shape.rows - packer.num_rows)
            start = packer.num_rows
            while last > first and not packer.add(segment, positions[number], first, last):
                # Alone it may be cut into pieces of few rows, as segments of long contexts are.
                last = first + (last - first) // 2 if start == 0 else first
            wanted += range(start + max(0, num_rows - segment.num_logits - first), start + last - first)
            first = last
            if last < num_rows:
                break
            number, first = number + 1, 0
        return number, first, wanted

    def _add_draws(self, draws: RowDraws) -> None:
        """Adds how rows are drawn from to the laid-out forward, if there is room for it."""
        count = len(draws.params)
        if 0 < count <= MAX_DRAWS:
            rows = self.packer.take_front(count * ROW_WORDS).view(ROW)
            write_rows(rows, draws.params, draws.output_indices, self.vocab_size)
            draws.on_device = self.packer.front(count * ROW_WORDS).view(count, ROW_WORDS)

    def _run(self, shape: Shape, wanted: list[int], num_layers: int | None, drawn: Tensor | None) -> list[Tensor]:
        """Runs what was laid out; returns the logits of the wanted rows, in pieces."""
        self.packer.finish(wanted)
        if drawn is not None:
            token_ids = self.inputs[shape].token_ids
            token_ids.copy_(filled_in(token_ids, drawn))
        replays = self._replays.get(shape) if num_layers is None else None
        hidden = self._moved_and_hidden(shape, num_layers) if replays is None else replays[0]()[0]
        self.pool.moves.clear()
        if not wanted:
            return []
        logits = self._logits(self.inputs[shape], hidden) if replays is None else replays[1]()[0]
        # A copy: the next forward writes its own logits there.
        found = [logits[: len(wanted)].clone()]
        for first in range(shape.wanted, len(wanted), shape.wanted):
            found.append(self._logits(self.inputs[shape], hidden, first)[: len(wanted) - first])
        return found


def warn_not_captured(error: RuntimeError, **sizes: int) -> None:
    """Warns in one line that there are no graphs, and what that means."""
    reason = (str(error) or repr(error)).splitlines()[0]
    log.warning(
        "graphs.not_captured",
        **sizes,
        error=reason,
        advice="kernels are launched one by one: texts are the same, and take longer",
    )


def capture_cuda(device: torch.device) -> Capture:
    """Returns a function that captures CUDA graphs in one pool of memory. Each model has its own.

    Each model has its own stream, too: libraries keep memory for partial sums, one for each stream that they were
    captured on. Graphs of two models that shared it would overwrite each other's sums when they run at the same time.
    """
    memory = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(compute: Replay) -> Replay:
        # Once outside a graph, so that kernels are compiled, and libraries take their memory.
        compute()
        torch.cuda.synchronize()
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream):
            results = compute()

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    return capture
