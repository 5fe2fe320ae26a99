"""A runner that fails like one on a broken accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.models.loading import LoadedModel
from outrider.models.runner import Runner, Segment


class FailingRunner:
    """Fails a forward if `fails` returns true for its segments."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.fails: Callable[[Sequence[Segment]], bool] = lambda segments: False
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, segments: Sequence[Segment], **options: Any) -> Tensor:
        if self.fails(segments):
            self.num_failed += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._runner.forward(segments, **options)


def with_failing_runner(model: LoadedModel) -> tuple[LoadedModel, FailingRunner]:
    """The model, with a runner that can be made to fail."""
    runner = FailingRunner(model.runner)
    return replace(model, runner=runner), runner  # type: ignore[arg-type]  # has what a runner has
