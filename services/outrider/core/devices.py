"""Names of the devices that a model can run on, as torch has them."""

from __future__ import annotations

import re

DEVICE_RULE = "cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps"
_DEVICE = re.compile(r"cpu|mps|(cuda|xpu)(:\d+)?")


def is_device(name: str) -> bool:
    """Returns True if a name obeys `DEVICE_RULE`. It is not checked that this machine has such a device."""
    return _DEVICE.fullmatch(name) is not None
