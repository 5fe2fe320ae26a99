"""Names of demo models, and the sizes that they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.models.checkpoint import DEMO_PREFIX

DEMO_FOLDER = Path(__file__).parent
REFERENCE_PARAMETERS = 100e6
"""Size of the target that `draft-cX` is X times smaller than."""
UNTRAINED = "draft-untrained"
"""Name of the draft before any training: even with it speculation must not lose."""
_NAME = re.compile(r"(?P<base>target|draft)(-(?P<millions>\d+)m|-c(?P<ratio>\d+(\.\d+)?))?")


@dataclass(frozen=True)
class Inflation:
    """Describes how large a model shall become."""

    num_parameters: float
    """About how many parameters in all: a whole number of layers is added."""
    intermediate_size: int
    """Width of every layer's MLP. Wide layers keep the share of operator calls small."""
    seed: int = 0


def parse_inflation(name: str) -> tuple[str, Inflation | None]:
    """Splits `target-100m` into `target` and its inflation, which is None if the model stays as it is.

    An unknown name is returned whole, with None; there is no such folder.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name, None
    if match["millions"]:
        millions = int(match["millions"])
        return match["base"], Inflation(millions * 1e6, 5504 if millions <= 150 else 16_384)
    if match["ratio"]:
        return match["base"], Inflation(REFERENCE_PARAMETERS / float(match["ratio"]), 5504)
    return match["base"], None


def demo_folder(model_id: str) -> Path | None:
    """Returns the folder that a demo model is made from; None if there is no demo model of this name."""
    name = model_id.removeprefix(DEMO_PREFIX)
    folder = DEMO_FOLDER / parse_inflation("draft" if name == UNTRAINED else name)[0]
    return folder if (folder / "config.json").is_file() else None
