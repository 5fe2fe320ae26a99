"""A runner by torch's operators, for any device, and for any model that attends through the library's interface."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.checkpoint import UnsupportedModel
from outrider.models.draws import RowDraws
from outrider.models.fusion import FusedStack, is_fusable
from outrider.models.kv_cache import TILE, KVPool
from outrider.models.packing import Segment
from outrider.models.rotary import RotaryTable
from outrider.models.runner import DEFAULT_NUM_BLOCKS, NumBlocks, Runner, resolved
from outrider.models.steps import Steps
from outrider.models.torch.plain import PlainHead, PlainStack
from outrider.models.torch.plan import Plan
from outrider.models.torch.products import Product, make_head, make_product
from outrider.models.torch.steps import TorchSteps

PADDINGS = (1, 2, 4)
"""Least rows of a forward that are tried: libraries may compute a single row differently than several."""


class Stack(Protocol):
    """Runs everything of a model below its head."""

    def __call__(self, plan: Plan, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of the wanted rows: [num wanted rows, hidden]."""


class TorchRunner(Runner):
    """Runs forwards of any number of rows, without buckets."""

    PACKAGES: ClassVar[tuple[str, ...]] = ("torch",)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fuse: bool = True,
        is_exact: bool = True,
        num_blocks: NumBlocks = DEFAULT_NUM_BLOCKS,
        block_size: int = TILE,
    ) -> None:
        """See `outrider.models.backend.MakeRunner`. Exact rows cost nothing here: `is_exact` changes nothing."""
        super().__init__(model, is_fused=fuse and is_fusable(model))
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._stack: Stack
        with torch.inference_mode():
            self._head = self.make_head(head, self.make_logits)
            if self.is_fused:
                self._stack = FusedStack(model, self.make_steps, self.make_product, self.cache_shape.dtype)
            else:
                self._stack = PlainStack(model)
                self._head = PlainHead(model, self._head)
        self.pool = KVPool(self.cache_shape, resolved(num_blocks), block_size)
        self._check_attention()

    # Overridden for some devices.

    def make_product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Makes a product of the layers, see `outrider.models.torch.products.make_product`."""
        return make_product(weight, bias)

    def make_logits(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Makes the product of the head, see `outrider.models.torch.products.make_head`."""
        return make_head(weight, bias, self.make_product)

    def make_steps(self, rotary: RotaryTable) -> Steps[Any]:
        """Makes the steps between the products."""
        return TorchSteps(rotary, self.dtype, self.cache_shape.dtype)

    def make_plan(self, segments: Sequence[Segment], min_rows: int = 1, drawn: Tensor | None = None) -> Plan:
        """Lays out a forward."""
        return Plan(segments, self.queries_per_key, min_rows, drawn)

    # See `Runner`.

    def run(
        self, segments: Sequence[Segment], num_layers: int | None, draws: RowDraws | None, drawn: Tensor | None
    ) -> Tensor | None:
        """See `Runner`. `draws` is ignored."""
        plan = self.make_plan(segments, self.min_rows, drawn)
        hidden = self._stack(plan, num_layers)
        plan.commit()
        if not plan.wanted_rows:
            return None
        # The head sees the wanted rows alone: most rows of a prompt need no logits.
        logits = self._head(hidden)[: plan.num_wanted]
        return logits if logits.dtype is torch.float32 else logits.float()

    def exact_ways(self) -> Iterator[None]:
        """See `Runner`: pads forwards to a few rows at least."""
        for self.min_rows in PADDINGS:
            yield
        self.min_rows = 1

    def arithmetic(self) -> list[str]:
        """See `Runner`."""
        return [_processor(self.device)]

    def large_products(self) -> list[tuple[Product, int]]:
        """See `Runner`."""
        return self._stack.large_products() if isinstance(self._stack, FusedStack) else []

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Runs one row, so that a model that would give wrong logits fails when it is loaded."""
        cache = self.new_cache()
        plan = self.make_plan([Segment(cache, [0], 1)])
        try:
            self._stack(plan)
        except UnsupportedModel:
            raise
        except Exception as error:
            # Any error: the code is the library's, and was not written to be run this way.
            raise UnsupportedModel(
                f"its layers do not run over packed rows: {type(error).__name__}: {error}"
            ) from error
        finally:
            cache.clear()
        if plan.num_attended != self.cache_shape.num_layers:
            raise UnsupportedModel(
                f"{plan.num_attended} of {self.cache_shape.num_layers} layers use the attention interface"
            )


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    # Libraries choose their kernels by these flags.
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
