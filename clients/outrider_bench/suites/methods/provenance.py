"""Whether the prompts that are measured were in the training text of the models: then nothing would be guessed.

The demo pair was trained on Python's standard library without the files whose names have a certain hash. The library of
the Python that runs this is searched for the prompts; its held-out files are told by their hash from those that the
models' card names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from outrider.models.demo.training.corpus import is_heldout, load_corpus

TAIL_LEN = 200
"""Characters at the end of a prompt that must not occur: what comes next is what is measured."""
_SOURCE = re.compile(r"CPython [\d.]+, Lib/(?P<name>\S+\.py)\b")
_DIGEST = re.compile(r"`([0-9a-f]{64})`")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What was found out about the prompts."""

    is_same_library: bool
    """Whether the held-out files here are those of the training."""
    num_prompts: int
    num_in_training_text: int
    """Whose end occurs in it."""
    num_from_learned_files: int
    """That name a file as their source that was not held out. One of them would be a mistake in the benchmark."""

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return asdict(self)

    @property
    def sentences(self) -> list[str]:
        """For the report."""
        said = [
            f"Prompts: {self.num_in_training_text} of {self.num_prompts} end in text that the models were trained on; "
            f"{self.num_from_learned_files} come from files of Python's library that were not held out."
        ]
        if not self.is_same_library:
            said.append(
                "The library of this Python is not that of the training (its held-out files have another hash), so the "
                "search says less than it should."
            )
        return said


def check_prompts(prompts: Sequence[str]) -> Provenance:
    """Searches the training text, 28 MB of it, for the ends of these prompts: about 20 ms each."""
    corpus = load_corpus()
    learned = "\n".join(source.text for source in corpus.train)
    return Provenance(
        is_same_library=corpus.heldout_digest == digest_of_training(),
        num_prompts=len(prompts),
        num_in_training_text=sum(prompt[-TAIL_LEN:] in learned for prompt in prompts),
        num_from_learned_files=sum(
            not is_heldout(match["name"]) for match in map(_SOURCE.match, sources_of(prompts)) if match
        ),
    )


def sources_of(prompts: Sequence[str]) -> list[str]:
    """What the benchmark's file of prompts names as the sources of these; of others nothing is known."""
    text = resources.files("outrider_cli").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    entries = (json.loads(line) for line in text.split("\n") if line.strip())
    sources = {entry["prompt"]: entry.get("source", "") for entry in entries}
    return [sources[prompt] for prompt in prompts if prompt in sources]


def digest_of_training() -> str | None:
    """The hash of the held-out files' names, as the models' card has it; None = it is not there."""
    card = resources.files("outrider.models.demo").joinpath("README.md")
    match = _DIGEST.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    return match[1] if match else None
