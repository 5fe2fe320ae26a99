"""What holds for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

# The tests share their cores with the services that they start: a second thread of torch would mostly wait.
torch.set_num_threads(1)

# What else the machine does is no property of the code.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")
