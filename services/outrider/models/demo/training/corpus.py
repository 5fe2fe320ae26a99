"""The training text: the standard library of the Python that runs this.

Every CPython installation carries about 28 MB of Python source, so the demo
pair can be rebuilt anywhere without downloading anything. The library's own
tests are kept: they are a third of the text and the most regular part of it.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Folders left out: code tables (``encodings``), parser fixtures (``lib2to3``),
#: drawings (``turtledemo``) and everything that is not part of the library.
EXCLUDED = frozenset({"encodings", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"})

#: One file in this many is held out (2 %).
HELDOUT_ONE_IN = 50

_DEF_LINE = re.compile(r"^[ \t]*(?:async )?def [^\n]*:[ \t]*\n", re.MULTILINE)


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path inside the library, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The two parts of the text, each in the order of the file names."""

    train: tuple[SourceFile, ...]
    heldout: tuple[SourceFile, ...]

    @property
    def heldout_digest(self) -> str:
        """SHA-256 of the held-out names, one a line: tells two splits apart."""
        names = "".join(f"{source.name}\n" for source in self.heldout)
        return hashlib.sha256(names.encode()).hexdigest()


def is_heldout(name: str) -> bool:
    """Returns True if a file is held out; depends on its relative path and nothing else."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the library below ``root`` (the running Python's by default) and split it."""
    train: list[SourceFile] = []
    heldout: list[SourceFile] = []
    for source in _sources(root or Path(sysconfig.get_path("stdlib"))):
        (heldout if is_heldout(source.name) else train).append(source)
    if not train or not heldout:
        raise RuntimeError("no Python sources found: is the standard library zipped?")
    return Corpus(tuple(train), tuple(heldout))


def _sources(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test fixtures are broken on purpose
        if text.strip():
            yield SourceFile(relative.as_posix(), text)


def code_prompts(corpus: Corpus, count: int, *, shortest: int = 300, longest: int = 450) -> list[str]:
    """Held-out text cut right after a ``def ...:`` line, ``shortest`` to ``longest`` characters.

    The files take turns, so the prompts come from as many of them as possible.
    A prompt starts at a line start, and none of them occurs in the training text.
    """
    training_text = "\n".join(source.text for source in corpus.train)
    queues = [_cuts(source.text, shortest, longest) for source in corpus.heldout]
    prompts: list[str] = []
    while queues and len(prompts) < count:
        remaining = []
        for queue in queues:
            prompt = next((text for text in queue if text[-200:] not in training_text), None)
            if prompt is not None:
                prompts.append(prompt)
                remaining.append(queue)
        queues = remaining
    return prompts[:count]


def _cuts(text: str, shortest: int, longest: int) -> Iterator[str]:
    """Prompts of one file that do not overlap, first to last."""
    used = 0
    for match in _DEF_LINE.finditer(text):
        end = match.end()
        start = text.find("\n", max(used, end - longest - 1)) + 1
        if 0 < start <= end - shortest:
            used = end
            yield text[start:end]
