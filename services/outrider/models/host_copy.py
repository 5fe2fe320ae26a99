"""A device's results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class HostCopy:
    """Copies a tensor to the host behind all that its device was asked for so far. What a CUDA device is asked for next
    need not be waited for to read it."""

    def __init__(self, tensor: Tensor) -> None:
        """Asks for the copy, on the stream that the calling thread works on."""
        # Of a GPU's tensor to pinned memory: any other copy would be waited for here.
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._wait: Callable[[], object] = lambda: None
        if tensor.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tensor.device))
            self._wait = event.synchronize
        elif tensor.device.type not in ("cpu", "meta"):
            self._wait = torch.get_device_module(tensor.device).synchronize

    def wait(self) -> Tensor:
        """Returns the copy when it is there."""
        self._wait()
        return self._tensor
