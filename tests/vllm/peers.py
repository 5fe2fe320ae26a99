"""Peers of the proposer as processes, and a target that repeats a known text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from outrider.core.tree import TokenId
from outrider.vllm.drafting import Drafting

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python module that serves, and its address, which it prints."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "services", ROOT / "clients")))
    running = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert running.stdout is not None
    try:
        yield running, running.stdout.readline().split()[1]
    finally:
        running.kill()
        running.communicate()


class ParrotBatch:
    """A batch whose target says the same texts whatever is drafted, as vLLM's does."""

    def __init__(self, texts: Sequence[Sequence[TokenId]], prompt_len: int) -> None:
        self.texts = texts
        self.lengths = np.full(len(texts), prompt_len + 1, np.int32)
        self.sampled = [[text[prompt_len]] for text in texts]
        self.num_drafted = self.num_accepted = 0
        self._token_ids = np.zeros((len(texts), 1024), np.int32)
        for row, text in enumerate(texts):
            self._token_ids[row, : len(text)] = text

    def step(self, drafting: Drafting) -> list[list[TokenId]]:
        """Has drafts made, and verifies them. Returns them."""
        drafts = drafting.propose(self.sampled, self.lengths, self._token_ids)
        for row, draft in enumerate(drafts):
            text, length = self.texts[row], int(self.lengths[row])
            count = 0
            while count < len(draft) and draft[count] == text[length + count]:
                count += 1
            self.sampled[row] = list(text[length : length + count + 1])
            self.lengths[row] += count + 1
            self.num_drafted += len(draft)
            self.num_accepted += count
        return drafts

    @property
    def is_over(self) -> bool:
        """True if a row is near the end of its text."""
        return any(length + 16 > len(text) for length, text in zip(self.lengths, self.texts, strict=True))
