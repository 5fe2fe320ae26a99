"""A runner by the kernels of a GPU: forwards of a few fixed shapes, and loops of several steps of a draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.models.cuda.graphs import BUCKETS, EXACT_ROWS, INVARIANT_BUCKETS, Capture, Forwards
from outrider.models.cuda.inputs import loop_lens
from outrider.models.cuda.loop import DraftLoop
from outrider.models.cuda.rows import MAX_NUM_BEST
from outrider.models.cuda.steps import CudaSteps, Kernels
from outrider.models.draws import Best, RowDraws
from outrider.models.fusion import FusedStack
from outrider.models.kv_cache import KVPool
from outrider.models.packing import Segment
from outrider.models.rotary import RotaryTable
from outrider.models.runner import NumBlocks, Runner, resolved
from outrider.models.torch.products import Product, TorchProduct, make_head


class CudaRunner(Runner):
    """Runs a model whose layers are known, and whose heads suit the kernels."""

    PACKAGES: ClassVar[tuple[str, ...]] = ("torch", "cuda")

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        capture: Capture | None,
        *,
        is_exact: bool,
        num_blocks: NumBlocks,
        block_size: int,
    ) -> None:
        """
        Args:
            model: See `Runner`.
            kernels: Functions that launch kernels.
            capture: Captures graphs. None runs the same functions one kernel after the other.
            is_exact: Uses products whose rows have the same bits whatever their number, if there are such.
            num_blocks: See `NumBlocks`.
            block_size: Slots of a block.
        """
        super().__init__(model, is_fused=True)
        self._kernels, self._capture_graph = kernels, capture
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

        def make_steps(rotary: RotaryTable) -> CudaSteps:
            self._steps = CudaSteps(rotary, self.dtype, kernels, self.max_context_len, is_exact=is_exact)
            return self._steps

        with torch.inference_mode():
            self._stack = FusedStack(model, make_steps, TorchProduct, self.cache_shape.dtype)
            self._head = self.make_head(
                head, lambda weight, bias: self._steps.head(make_head(weight, bias, TorchProduct))
            )
            # Launches go to the thread's current device.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                if self._steps.is_invariant:
                    self._steps.try_invariant(INVARIANT_BUCKETS)
        self.has_one_shape = is_exact and not self.is_invariant
        """True if all forwards have the same number of rows, so that libraries compute each row alike."""
        self._loop: DraftLoop | None = None
        if callable(num_blocks):
            # Run on trial with a pool of one block: the memory that is free then is free for the pool.
            self._make_forwards(KVPool(self.cache_shape, 1, block_size, num_scratch_slots=1), None).warm()
        self.pool = KVPool(self.cache_shape, resolved(num_blocks), block_size, num_scratch_slots=1)
        self._capture()

    @torch.inference_mode()
    def _make_forwards(self, pool: KVPool, capture: Capture | None) -> Forwards:
        return Forwards(
            lambda inputs, num_layers: self._stack.all_rows(inputs.token_ids, inputs, num_layers),
            self._head,
            self._steps,
            pool,
            queries_per_key=self.queries_per_key,
            max_context_len=self.max_context_len,
            vocab_size=self.vocab_size,
            buckets=(EXACT_ROWS,) if self.has_one_shape else INVARIANT_BUCKETS if self.is_invariant else BUCKETS,
            capture=capture,
        )

    def _capture(self) -> None:
        if self.device.type == "cuda":
            # Memory that the trial has taken goes to the pool of the graphs.
            torch.cuda.empty_cache()
        self._forwards = self._make_forwards(self.pool, self._capture_graph)

    @property
    def is_invariant(self) -> bool:
        """True if products are batch-invariant, so that rows are exact in forwards of any number of them."""
        return self._steps.is_invariant

    # See `Runner`.

    @property
    def buckets(self) -> tuple[int, ...]:
        """See `Runner`."""
        return self._forwards.buckets

    @property
    def takes_gaps(self) -> bool:
        """See `Runner`."""
        return False

    @property
    def graphs(self) -> str:
        """See `Runner`."""
        if not self._forwards.has_graphs:
            return "eager"
        return "one-shape" if self.has_one_shape else "buckets"

    def exact_ways(self) -> Iterator[None]:
        """See `Runner`: batch-invariant products; then forwards that all have the same number of rows. After these,
        forwards have the fewest rows."""
        while self.is_invariant or self.has_one_shape:
            yield
            self.has_one_shape = self.is_invariant
            self._steps.is_invariant = False
            del self._forwards
            self._loop = None
            self._capture()

    def arithmetic(self) -> list[str]:
        """See `Runner`."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "host"
        return [self._kernels.compiler, str(torch.version.cuda), str(self.is_invariant), device]

    def run(
        self, segments: Sequence[Segment], num_layers: int | None, draws: RowDraws | None, drawn: Tensor | None
    ) -> Tensor | None:
        """See `Runner`."""
        return self._forwards.forward(segments, num_layers, draws, drawn)

    def large_products(self) -> list[tuple[Product, int]]:
        """See `Runner`."""
        return self._stack.large_products()

    def make_loop(self) -> None:
        """See `Runner`."""
        if self._loop is None and self.vocab_size >= MAX_NUM_BEST:
            # If capture failed for single forwards, it is neither tried nor reported again.
            capture = self._capture_graph if self._forwards.has_graphs else None
            self._loop = DraftLoop(self._forwards, self._kernels.best_tokens, capture)

    @property
    def has_loop(self) -> bool:
        """See `Runner`."""
        return self._loop is not None

    def loop_lens(self, num_steps: int) -> list[int]:
        """See `Runner`, and `outrider.models.cuda.inputs.loop_lens`."""
        return [] if self._loop is None else loop_lens(num_steps)

    def draft(
        self,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> list[list[Best | None]]:
        """See `Runner`."""
        assert self._loop is not None, "`loop_lens` says if there is one"
        return self._loop.run(segments, params, first_indices, length)
