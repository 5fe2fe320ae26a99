"""Kernels that begin while the one before them on the stream ends.

Where a kernel is launched so, its programs come to processors as soon as those of the kernel before it leave room
there. They read what nobody writes meanwhile, and wait for all that the kernel before them has written. So a launch
takes no time of its own (CUDA's programming guide, "Programmatic Dependent Launch and Synchronization").

A kernel that takes part lets the next one begin at once, and waits before it reads or writes anything but this: weights
and tables of the model, and the inputs of the forward, which are on the device before its first kernel. At least one of
its programs waits in any case: so who has waited for a kernel has waited for all before it, too. Whoever takes no part,
as a library's kernels do not, begins and ends by itself, as ever.
"""

from __future__ import annotations

from functools import cache

import torch

CAPABILITY = 9
"""Least major compute capability of the GPUs that can: that of Hopper."""


@cache
def overlaps(device: torch.device) -> bool:
    """Returns True if kernels of a device can begin while others end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


def launch_options(is_early: bool) -> dict[str, bool]:
    """Returns what the launch of a kernel is to be told.

    Args:
        is_early: True if it may begin while the kernel before it ends.
    """
    # Not told otherwise: an interpreter does not know the option.
    return {"launch_pdl": True} if is_early else {}
