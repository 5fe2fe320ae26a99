"""Kernels of a GPU are tested by `make kernels` alone: it installs triton, and says whether it is to interpret them."""

from __future__ import annotations

import os

import pytest

MODES = {"compile": "0", "interpret": "1"}
"""Mark -> the value of TRITON_INTERPRET with which tests of it run. Triton reads it when it is imported."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, value in MODES.items():
            if item.get_closest_marker(mark) and os.environ.get("TRITON_INTERPRET") != value:
                item.add_marker(pytest.mark.skip(reason="kernels of a GPU: by `make kernels`"))
