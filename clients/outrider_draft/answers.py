"""A folder of a target's answers: token ids, and the target's best log-probabilities for each token of an answer.

`data.json` says whose answers they are. Each `answers-*.safetensors` holds some documents, and appears when it is
complete: an interrupted run loses only what is not in a file yet, and a later one adds to the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from outrider_cli.failures import FlagError
from outrider_draft.files import written

HEADER = "data.json"
SHARDS = "answers-*.safetensors"
TOKENS_PER_SHARD = 1 << 17
"""Tokens after which a file is written: some minutes of sampling on two cores."""


class BadAnswers(Exception):
    """A folder holds no answers, or others than are wanted. The message is one line and names the folder."""


@dataclass(frozen=True, slots=True)
class Header:
    """Says whose answers a folder holds."""

    model: str
    """Name of the target."""
    tokenizer_hash: str
    vocab_size: int
    num_top: int
    """Log-probabilities of a token: those of the tokens that the target held most likely."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One conversation, of which the target wrote the end."""

    token_ids: npt.NDArray[np.int32]
    """The whole conversation, [num_tokens]."""
    first: int
    """Position of the first token that the target wrote."""
    top_ids: npt.NDArray[np.int32]
    """The most likely tokens at each position from `first` on, the likeliest first, [num_tokens - first, num_top]."""
    top_logprobs: npt.NDArray[np.float16]
    """Their log-probabilities in nats, at temperature 1, [num_tokens - first, num_top]."""


class AnswersWriter:
    """Adds documents to a folder. `flush` writes what is left; without it the last, incomplete file is lost."""

    def __init__(self, folder: Path, header: Header) -> None:
        """Makes the folder, or goes on in one. Raises BadAnswers if it holds the answers of another target, or if
        another writer is at it; OSError if it cannot be made."""
        self._folder = folder
        self._pending: list[Document] = []
        self._num_pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)
        # Two writers would give the same number to their files. The lock ends with this process at the latest.
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check(header)
        except BlockingIOError:
            os.close(self._lock)
            raise BadAnswers(f"{folder}: another command is writing answers there") from None
        except BaseException:
            os.close(self._lock)
            raise

    def _check(self, header: Header) -> None:
        if not (self._folder / HEADER).is_file():
            with written(self._folder / HEADER) as partial:
                partial.write_text(json.dumps(asdict(header), indent=2) + "\n", encoding="utf-8")
        elif (found := asdict(read_header(self._folder))) != asdict(header):
            name, wanted = next(pair for pair in asdict(header).items() if found[pair[0]] != pair[1])
            raise BadAnswers(
                f"{self._folder} holds answers with {name} {found[name]}, not {wanted}: name another folder"
            )

    def add(self, document: Document) -> None:
        """Adds a document; may write a file. Raises OSError; then nothing is lost, and `flush` may be tried again."""
        self._pending.append(document)
        self._num_pending_tokens += len(document.token_ids)
        if self._num_pending_tokens >= TOKENS_PER_SHARD:
            self.flush()

    def close(self) -> None:
        """Writes what is left, and lets others write to the folder. Raises OSError."""
        try:
            self.flush()
        finally:
            os.close(self._lock)

    def flush(self) -> None:
        """Writes what is not in a file yet. Raises OSError."""
        if not self._pending:
            return
        arrays = {
            "token_ids": np.concatenate([each.token_ids for each in self._pending]),
            "lengths": np.array([len(each.token_ids) for each in self._pending], np.int64),
            "firsts": np.array([each.first for each in self._pending], np.int64),
            "top_ids": np.concatenate([each.top_ids for each in self._pending]),
            "top_logprobs": np.concatenate([each.top_logprobs for each in self._pending]),
        }
        number = 1 + max((int(path.stem.rpartition("-")[2]) for path in self._folder.glob(SHARDS)), default=-1)
        with written(self._folder / f"answers-{number:06}.safetensors") as partial:
            save_file(arrays, partial)
        self._pending.clear()
        self._num_pending_tokens = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """Holds all documents of a folder, in the order in which they were written."""

    header: Header
    documents: Sequence[Document]

    @property
    def num_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(len(document.top_ids) for document in self.documents)


def read_answers(folder: Path) -> Answers:
    """Reads a whole folder into memory. Raises BadAnswers."""
    documents = [document for path in sorted(folder.glob(SHARDS)) for document in _read_shard(path)]
    if not documents:
        raise BadAnswers(f"{folder} holds no answers yet")
    return Answers(read_header(folder), documents)


def documents_of(folders: Sequence[Path], tokenizer_hash: str, vocab_size: int) -> list[Document]:
    """Reads the documents of folders, which must be of this tokenizer, with ids below `vocab_size`. Raises FlagError,
    which names `--data`."""
    documents: list[Document] = []
    for path in folders:
        try:
            header = read_header(path)
            if header.tokenizer_hash != tokenizer_hash:
                raise FlagError("--data", "answers in the draft's tokenizer", f"{path}, of {header.model}")
            if header.vocab_size > vocab_size:
                rule = f"answers of a vocabulary of at most {vocab_size} tokens, as the draft's"
                raise FlagError("--data", rule, f"{path}, with {header.vocab_size}")
            documents += read_answers(path).documents
        except BadAnswers as error:
            raise FlagError("--data", f"a folder of answers ({error})", path) from None
    tops = {document.top_ids.shape[1] for document in documents}
    if len(tops) > 1:
        raise FlagError("--data", "folders with equally many log-probabilities for a token", sorted(tops))
    return documents


def read_prompts(folder: Path) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
    """Yields the prompt of each document, and how many tokens the target wrote after it. Does not read what is large,
    the log-probabilities. Raises BadAnswers."""
    for path in sorted(folder.glob(SHARDS)):
        try:
            with safe_open(path, "numpy") as file:
                token_ids, lengths, firsts = (file.get_tensor(name) for name in ("token_ids", "lengths", "firsts"))
        except Exception as error:  # safetensors raises its own for a file that is cut off
            raise BadAnswers(f"{path} cannot be read: {error}") from error
        starts = np.cumsum(lengths) - lengths
        for start, length, first in zip(starts.tolist(), lengths.tolist(), firsts.tolist(), strict=True):
            yield token_ids[start : start + first], length - first


def read_header(folder: Path) -> Header:
    """Reads whose answers a folder holds. Raises BadAnswers."""
    try:
        return Header(**json.loads((folder / HEADER).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BadAnswers(f"{folder} holds no answers: it has no {HEADER}") from None
    except (OSError, ValueError, TypeError) as error:
        raise BadAnswers(f"{folder}: {HEADER} cannot be read: {error}") from error


def _read_shard(path: Path) -> Iterator[Document]:
    try:
        arrays = load_file(path)
        token_ids, top_ids, top_logprobs = (arrays[name] for name in ("token_ids", "top_ids", "top_logprobs"))
        start = row = 0
        for length, first in zip(arrays["lengths"].tolist(), arrays["firsts"].tolist(), strict=True):
            rows = slice(row, row + length - first)
            yield Document(token_ids[start : start + length], first, top_ids[rows], top_logprobs[rows])
            start, row = start + length, rows.stop
    except Exception as error:  # safetensors raises its own for a file that is cut off
        raise BadAnswers(f"{path} cannot be read: {error}") from error
