"""Kernels of a GPU are tested by `make kernels` alone: it installs triton, and says whether it is to interpret them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

MODES = {"compile": "0", "interpret": "1"}
"""Mark -> the value of TRITON_INTERPRET with which tests of it run. Triton reads it when it is imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, value in MODES.items():
            if item.get_closest_marker(mark) and os.environ.get("TRITON_INTERPRET") != value:
                item.add_marker(pytest.mark.skip(reason="kernels of a GPU: by `make kernels`"))


@pytest.fixture(autouse=True)
def _products_of_an_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in Triton's interpreter that add one by one, for every row alike, as those of a GPU do.

    The interpreter's own are numpy's: their bits depend on a row's place, and they take bfloat16 for whole numbers.
    """
    if not request.node.get_closest_marker("interpret"):
        return
    from triton.runtime import interpreter

    def create_dot(_builder: Any, a: Any, b: Any, sums: Any, _precision: Any, _max_num_imprecise: Any) -> Any:
        left, right = _widened(a), _widened(b)
        found = sums.data.copy()
        for k in range(left.shape[1]):
            found += left[:, k, None] * right[k]
        return interpreter.TensorHandle(found, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _widened(handle: Any) -> npt.NDArray[np.float32]:
    if handle.data.dtype == np.uint16:  # bits of a bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(handle.data, dtype=np.float32)
