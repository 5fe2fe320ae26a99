"""A runner by the kernels of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from outrider.models.cpu import kernels
from outrider.models.cpu.paths import CpuPlan
from outrider.models.cpu.products import make_head, make_product
from outrider.models.cpu.steps import CpuSteps
from outrider.models.packing import Segment
from outrider.models.rotary import RotaryTable
from outrider.models.steps import Steps
from outrider.models.torch.plan import Plan
from outrider.models.torch.products import Product
from outrider.models.torch.runner import TorchRunner


class CpuRunner(TorchRunner):
    """Runs attention, the steps between the products of known layers, and some products by kernels."""

    PACKAGES: ClassVar[tuple[str, ...]] = ("torch", "cpu")

    def make_product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See `outrider.models.cpu.products`."""
        return make_product(weight, bias)

    def make_logits(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See `outrider.models.cpu.products`."""
        return make_head(weight, bias)

    def make_steps(self, rotary: RotaryTable) -> Steps[Any]:
        """See `TorchRunner`."""
        return CpuSteps(rotary, self.dtype)

    def make_plan(self, segments: Sequence[Segment], min_rows: int = 1, drawn: Tensor | None = None) -> Plan:
        """See `TorchRunner`."""
        return CpuPlan(segments, self.queries_per_key, min_rows, drawn)

    def arithmetic(self) -> list[str]:
        """See `Runner`."""
        return [kernels.COMPILER, *super().arithmetic()]
