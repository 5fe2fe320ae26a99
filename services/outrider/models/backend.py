"""The backends: each runs a model, and draws from its logits, on one kind of device. They are `outrider.models.cpu`,
`outrider.models.cuda`, and `outrider.models.torch`, which runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import structlog
import torch
from transformers import PreTrainedModel

from outrider.models.cpu.draws import CpuDraws
from outrider.models.cpu.runner import CpuRunner
from outrider.models.cuda.backend import CudaBackend
from outrider.models.draws import Draws
from outrider.models.kv_cache import TILE
from outrider.models.runner import DEFAULT_NUM_BLOCKS, NumBlocks, Runner
from outrider.models.torch.draws import TorchDraws
from outrider.models.torch.runner import TorchRunner

log = structlog.get_logger(__name__)


class MakeRunner(Protocol):
    """Makes the runner of a model, which it takes over."""

    def __call__(
        self,
        model: PreTrainedModel,
        *,
        fuse: bool = True,
        is_exact: bool = True,
        num_blocks: NumBlocks = DEFAULT_NUM_BLOCKS,
        block_size: int = TILE,
    ) -> Runner:
        """
        Args:
            model: Any causal model of the library with standard attention, in its final type and on its device.
            fuse: Takes the layers apart where they are known (`outrider.models.fusion`).
            is_exact: True if rows must have the same bits whatever runs next to them, even where that costs time.
            num_blocks: Blocks of the pool of keys and values.
            block_size: Slots of a block.

        Raises:
            UnsupportedModel: The model has no head, or states no context; or a layer does not attend through the
                library's attention interface, or attends with extras.
        """


class Backend(NamedTuple):
    """Makes what computes on one kind of device."""

    make_runner: MakeRunner
    make_draws: Callable[[], Draws]
    """Makes the object that draws from logits, for one thread."""


CPU = Backend(CpuRunner, CpuDraws)
TORCH = Backend(TorchRunner, TorchDraws)


@cache
def backend_of(device: torch.device, *, use_graphs: bool = True) -> Backend:
    """Returns the backend of a device.

    Args:
        device: Where a model is, or its logits.
        use_graphs: Captures CUDA graphs.
    """
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        try:
            cuda = CudaBackend.on(device, use_graphs=use_graphs)
            return Backend(cuda.make_runner, cuda.make_draws)
        except ImportError as error:
            log.warning(
                "kernels.not_used", reason=str(error), advice="install triton: forwards are several times slower"
            )
    return TORCH
