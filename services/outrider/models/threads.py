"""How many threads a forward may use on a CPU."""

from __future__ import annotations

import torch


def set_num_threads(num_threads: int) -> None:
    """Sets it for this process; 0 leaves torch's own choice. To be called before the first forward.

    More threads than cores, or two processes with several threads on the same cores, are many times slower than one
    thread each.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
