"""Kernels that begin while the one before them on the stream ends.

A kernel that takes part lets the next one begin at once. If that one is launched early, its programs start as soon as
processors have room, read only data that no kernel writes meanwhile, and then wait for all that the kernel before them
has written. So a launch takes no time of its own (CUDA's programming guide, "Programmatic Dependent Launch and
Synchronization").

Before it has waited, a kernel may read weights and tables of the model, and those inputs of a forward that the host
lays out: they are on the device before the first kernel of a graph. `Inputs.token_ids` is not one of them, because
drawn tokens are written there in the middle of the stream. A kernel writes nothing before it has waited. At least one
of its programs always waits, so waiting for a kernel means waiting for all kernels before it, too. Kernels that take no
part, such as a library's, let the next one begin when they have ended.
"""

from __future__ import annotations

from functools import cache

import torch

CAPABILITY = 9
"""Least major compute capability of the GPUs that support it: that of Hopper."""


@cache
def overlaps(device: torch.device) -> bool:
    """Returns True if kernels of a device can begin while others end."""
    # AMD's GPUs are of type cuda, too.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


def launch_options(is_early: bool) -> dict[str, bool]:
    """Returns the options of a kernel's launch.

    Args:
        is_early: True if it may begin while the kernel before it ends. It must wait then.
    """
    # Otherwise no option is passed: Triton's interpreter does not know this one.
    return {"launch_pdl": True} if is_early else {}
