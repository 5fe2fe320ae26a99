"""What holds for all tests."""

from __future__ import annotations

import torch

# The tests share their cores with the services that they start: a second thread of torch would mostly wait.
torch.set_num_threads(1)
