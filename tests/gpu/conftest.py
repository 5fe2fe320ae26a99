"""The device of these tests: `OUTRIDER_TEST_DEVICE`, or the first GPU. `cpu` tries the tests themselves."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.models.loading import LoadedModel, load_model


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test."""
    chosen = os.environ.get("OUTRIDER_TEST_DEVICE", "cuda:0")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return chosen


@pytest.fixture(scope="session")
def target(device: str) -> LoadedModel:
    """The demo target on the device, in a GPU's usual number format."""
    return load_model("demo/target", dtype="bfloat16", device=device, exact="auto")
