"""A GPU with Triton as a backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from transformers import PreTrainedModel

from outrider.models.cuda.device_draws import CudaDraws
from outrider.models.cuda.graphs import Capture, capture_cuda
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import Kernels
from outrider.models.fusion import is_fusable
from outrider.models.kv_cache import TILE
from outrider.models.runner import DEFAULT_NUM_BLOCKS, NumBlocks, Runner, cache_shape
from outrider.models.torch.runner import TorchRunner

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class CudaBackend:
    """Runs models and draws by our own kernels, see `Backend`. Models without kernels run by torch."""

    kernels: Kernels
    """Functions that launch kernels."""
    make_capture: Callable[[], Capture] | None
    """Makes the function that captures the graphs of one model. None runs the same functions one kernel after the
    other."""

    @classmethod
    def on(cls, device: torch.device, *, use_graphs: bool) -> CudaBackend:
        """Returns that of a CUDA device. Raises ImportError if there is no Triton."""
        kernels = Kernels.load()
        # Sums in bfloat16 depend on how a library splits them; with this workspace it always splits them alike.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return cls(kernels, partial(capture_cuda, device) if use_graphs else None)

    def make_runner(
        self,
        model: PreTrainedModel,
        *,
        fuse: bool = True,
        is_exact: bool = True,
        num_blocks: NumBlocks = DEFAULT_NUM_BLOCKS,
        block_size: int = TILE,
    ) -> Runner:
        """See `Backend`."""
        if reason := self._why_not(model, fuse=fuse):
            log.warning("kernels.not_used", reason=reason)
            return TorchRunner(model, fuse=fuse, num_blocks=num_blocks, block_size=block_size)
        capture = self.make_capture() if self.make_capture is not None else None
        how = self.kernels, capture
        return CudaRunner(model, *how, is_exact=is_exact, num_blocks=num_blocks, block_size=block_size)

    def make_draws(self) -> CudaDraws:
        """See `Backend`."""
        from outrider.models.cuda.device_chains import launch  # only an installation for CUDA has Triton

        return CudaDraws(self.kernels.best_tokens, launch)

    def _why_not(self, model: PreTrainedModel, *, fuse: bool) -> str:
        """Returns why a model does not run by the kernels; empty if it does."""
        if not (fuse and is_fusable(model)):
            return f"layers of a model of type {model.config.get_text_config().model_type} run as they are"
        shape = cache_shape(model)
        queries_per_key = model.config.get_text_config().num_attention_heads // shape.num_heads
        try:
            self.kernels.check_shape(queries_per_key, shape.head_dim)
        except ValueError as error:
            return str(error)
        return ""
