"""A device's results on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies a tensor to the host behind all that its device was asked for so far. What it is asked for next need not
    be waited for to read it."""

    def __init__(self, tensor: Tensor) -> None:
        """Asks for the copy, on the stream that the calling thread works on."""
        # Of a CUDA tensor to pinned memory. Of other devices copies are waited for, as there is no event here for them.
        self._tensor = tensor.to("cpu", non_blocking=tensor.is_cuda)
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Returns the copy when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
