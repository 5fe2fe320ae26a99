"""The folder of a target's answers: what was written stays whole, and only answers of one target are together."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from outrider_draft.answers import (
    HEADER,
    SHARDS,
    AnswersWriter,
    BadAnswers,
    Document,
    Header,
    read_answers,
    read_header,
    read_prompts,
)

A_HEADER = Header(model="a", tokenizer_hash="t", vocab_size=50, num_top=3)


def document(first: int, num_answered: int) -> Document:
    """A document with numbers of its own."""
    random = np.random.default_rng(first)
    return Document(
        random.integers(0, 50, first + num_answered, np.int32),
        first,
        random.integers(0, 50, (num_answered, 3), np.int32),
        random.normal(size=(num_answered, 3)).astype(np.float16),
    )


def are_equal(one: Document, other: Document) -> bool:
    return all(np.array_equal(*pair) for pair in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True))


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Lets no file of this process grow beyond a size, as a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_documents_come_back_from_several_files_in_order(tmp_path: Path) -> None:
    documents = [document(*lengths) for lengths in ((3, 4), (1, 1), (5, 9))]
    for some in (documents[:2], documents[2:]):
        writer = AnswersWriter(tmp_path, A_HEADER)
        for each in some:
            writer.add(each)
        writer.close()
    answers = read_answers(tmp_path)
    assert answers.header == A_HEADER
    assert answers.num_tokens == 14
    assert all(map(are_equal, answers.documents, documents))
    assert len(list(tmp_path.glob(SHARDS))) == 2
    assert [(prompt.tolist(), length) for prompt, length in read_prompts(tmp_path)] == [
        (each.token_ids[: each.first].tolist(), len(each.top_ids)) for each in documents
    ]


def test_a_full_disk_loses_nothing_that_was_written(tmp_path: Path) -> None:
    writer = AnswersWriter(tmp_path, A_HEADER)
    writer.add(document(3, 4))
    writer.flush()
    writer.add(document(2, 500))
    with files_up_to(2000), pytest.raises(OSError, match="too large"):
        writer.flush()
    (whole,) = read_answers(tmp_path).documents
    assert are_equal(whole, document(3, 4))
    assert len(list(tmp_path.iterdir())) == 2, "nothing half is left over"
    writer.close()
    assert len(read_answers(tmp_path).documents) == 2, "it is written when there is room"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model": "b"}, "model a, not b"), ({"tokenizer_hash": "u"}, "tokenizer_hash t"), ({"num_top": 2}, "num_top 3")],
)
def test_answers_of_another_target_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    AnswersWriter(tmp_path, A_HEADER).close()
    with pytest.raises(BadAnswers, match=words):
        AnswersWriter(tmp_path, dataclasses.replace(A_HEADER, **change))  # type: ignore[arg-type]
    assert read_header(tmp_path) == A_HEADER


def test_only_one_writes_at_a_time(tmp_path: Path) -> None:
    writer = AnswersWriter(tmp_path, A_HEADER)
    with pytest.raises(BadAnswers, match="another command"):
        AnswersWriter(tmp_path, A_HEADER)
    writer.close()
    AnswersWriter(tmp_path, A_HEADER).close()


def test_what_is_no_folder_of_answers_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadAnswers, match="holds no answers"):
        read_answers(tmp_path)
    (tmp_path / HEADER).write_text("{}")
    with pytest.raises(BadAnswers, match=HEADER):
        read_header(tmp_path)
    (tmp_path / "answers-000000.safetensors").write_bytes(b"cut off")
    with pytest.raises(BadAnswers, match=r"answers-000000\.safetensors cannot be read"):
        read_answers(tmp_path)
    with pytest.raises(BadAnswers, match=r"answers-000000\.safetensors cannot be read"):
        list(read_prompts(tmp_path))
