"""Kernels that begin while the one before them on the stream ends.

A kernel that takes part lets the next one begin at once: where that one is launched so, its programs come to processors
as soon as there is room on them, read what nobody writes meanwhile, and wait for all that the kernel before them has
written. So a launch takes no time of its own (CUDA's programming guide, "Programmatic Dependent Launch and
Synchronization").

Before it has waited, a kernel may read weights and tables of the model, and of the inputs of a forward those that the
host lays out: they are on the device before the first kernel of a graph. `Inputs.token_ids` is not one of them, as
tokens that were drawn go there in the middle of the stream. It writes nothing before. At least one of its programs
waits in any case: so who has waited for a kernel has waited for all before it, too. Kernels that take no part, as a
library's, let the next one begin when they have ended.
"""

from __future__ import annotations

from functools import cache

import torch

CAPABILITY = 9
"""Least major compute capability of the GPUs that can: that of Hopper."""


@cache
def overlaps(device: torch.device) -> bool:
    """Returns True if kernels of a device can begin while others end."""
    # AMD's GPUs call themselves cuda, too.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


def launch_options(is_early: bool) -> dict[str, bool]:
    """Returns the options of a kernel's launch.

    Args:
        is_early: True if it may begin while the kernel before it ends. It must wait then.
    """
    # Otherwise there are none: an interpreter does not know this one.
    return {"launch_pdl": True} if is_early else {}
