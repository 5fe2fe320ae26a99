"""`training.json`: how a draft came about, and how good it is."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider_draft.files import written

NAME = "training.json"


class NoDraft(ValueError):
    """A folder is no draft that `outrider draft new` has made. The message is one line."""


@dataclass(slots=True)
class Card:
    """Everything that is known of a draft."""

    target: str
    source: str
    """Model whose weights it began with."""
    num_parameters: int
    share: float
    """Predicted share of the target's cost of a token."""
    keeps_embedding: bool = False
    """Whether embedding and head are the target's, and are not trained."""
    recipe: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    """Tokens of the target that it has learnt from, all runs together; a token that is seen again counts again."""
    hours: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    """Acceptance on held-out documents, the earliest first: tokens, hours, greedy, T=0.7, T=1."""
    judged: dict[str, Any] = field(default_factory=dict)
    """What `outrider draft judge` has measured."""

    def write(self, folder: Path) -> None:
        """Writes the card. Raises OSError; the one before is then still there."""
        with written(folder / NAME) as partial:
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path) -> Card:
    """Reads a card. Raises NoDraft."""
    try:
        return Card(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NoDraft(f"{folder} is no draft: it has no {NAME}; `outrider draft new` makes one") from None
    except (OSError, ValueError, TypeError) as error:
        raise NoDraft(f"{folder}: {NAME} cannot be read: {error}") from error


def machine(device: str) -> dict[str, Any]:
    """Describes the machine of a training."""
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return {**found, "device": name, "torch": torch.__version__}
