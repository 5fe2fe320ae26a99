"""Tests of GPU kernels run only under `make kernels`, which installs Triton and says if it is to interpret them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

MODES = {"compile": "0", "interpret": "1"}
"""Mark -> the value of TRITON_INTERPRET with which its tests run. Triton reads it when it is imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, value in MODES.items():
            if item.get_closest_marker(mark) and os.environ.get("TRITON_INTERPRET") != value:
                item.add_marker(pytest.mark.skip(reason="kernels of a GPU: by `make kernels`"))


@pytest.fixture(autouse=True)
def _arithmetic_of_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton's interpreter multiply and round as a GPU does.

    Its own products are numpy's: their bits depend on a row's place, and they take bfloat16 for integers. It also
    truncates where it converts to bfloat16.
    """
    if not request.node.get_closest_marker("interpret"):
        return
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def create_dot(_builder: Any, a: Any, b: Any, sums: Any, _precision: Any, _max_num_imprecise: Any) -> Any:
        left, right = _widened(a.data), _widened(b.data)
        found = sums.data.copy()
        # Input by input, so that every row is computed alike.
        for k in range(left.shape[-1]):
            found += left[..., k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(found, sums.dtype.scalar)

    def convert_float(values: Any, old: Any, new: Any, rounding: Any) -> Any:
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(values, old, new, rounding)
        bits: npt.NDArray[np.uint16] = torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()
        return bits

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def _widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if values.dtype == np.uint16:  # bits of a bfloat16
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, dtype=np.float32)
