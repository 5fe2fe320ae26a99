"""Prior files: written documents are read back, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_cli import prior_file
from outrider_cli.prior_file import PriorFileError, PriorHeader, format_prior, parse_prior, read_prior, write_prior

VOCAB_SIZE = 70_000
HEADER = PriorHeader("ab" * 32, VOCAB_SIZE, "a model", rounds=2)
DOCUMENTS = [[1, 2, 3], [VOCAB_SIZE - 1, 0]]

documents_of_any_kind = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=20), min_size=1, max_size=8
)


def sealed(header: object, body: bytes, version: int = prior_file.VERSION) -> bytes:
    """A file of these parts, with correct lengths and checksum, as only a wrong program writes one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<8sIIQ", prior_file.MAGIC, version, len(text), len(body)) + text + body
    return data + hashlib.sha256(data).digest()


def fields(**changes: object) -> dict[str, Any]:
    """The fields of a valid header, with the changes."""
    right = {
        "tokenizer_hash": "ab",
        "vocab_size": 100,
        "model_id": "a model",
        "rounds": 1,
        "created_by": "a test",
        "num_documents": 1,
        "num_tokens": 2,
    }
    return right | changes


def packed(*numbers: int) -> bytes:
    return zlib.compress(struct.pack(f"<{len(numbers)}i", *numbers))


BODY = packed(2, 5, 6)


@given(documents_of_any_kind, st.integers(1, 100))
def test_what_is_written_is_read(documents: list[list[int]], rounds: int) -> None:
    header = PriorHeader("ab" * 32, VOCAB_SIZE, "modèle/ü", rounds)
    prior = parse_prior(format_prior(header, documents))
    assert prior.header == header
    assert [list(document) for document in prior.documents] == documents
    assert prior.num_tokens == sum(map(len, documents))


@given(documents_of_any_kind, st.data())
def test_no_bytes_of_any_file_can_be_changed(documents: list[list[int]], data: st.DataObject) -> None:
    right = format_prior(HEADER, documents)
    start = data.draw(st.integers(0, len(right) - 1))
    wrong = right[:start] + data.draw(st.binary(max_size=40)) + right[data.draw(st.integers(start, len(right))) :]
    if wrong != right:
        with pytest.raises(PriorFileError):
            parse_prior(wrong)


def test_no_end_can_be_missing(tmp_path: Path) -> None:
    data = format_prior(HEADER, DOCUMENTS)
    path = tmp_path / "prior"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(PriorFileError, match="not a prior file" if size == 0 else f"truncated: has {size} "):
            read_prior(path)
    path.write_bytes(data + b"x")
    with pytest.raises(PriorFileError, match=f"corrupt: has more than the {len(data)} bytes"):
        read_prior(path)


@given(st.binary())
def test_anything_else_is_no_prior_file(data: bytes) -> None:
    with pytest.raises(PriorFileError):
        parse_prior(data)


def test_another_version_is_named_with_ours() -> None:
    with pytest.raises(PriorFileError, match="has version 7 of the format, this program knows version 1"):
        parse_prior(sealed(fields(), BODY, version=7))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[" * 60_000, "must be JSON"),
        ([], "must be an object with created_by, model_id"),
        ({"rounds": 1}, "must be an object with created_by, model_id"),
        (fields(more=1), "must be an object with created_by, model_id"),
        (fields(vocab_size=0), "header: vocab_size must be a number in"),
        (fields(vocab_size="9"), "header: vocab_size must be a number in"),
        (fields(rounds=True), "header: rounds must be a number in"),
        (fields(rounds=1.5), "header: rounds must be a number in"),
        (fields(tokenizer_hash=""), "header: tokenizer_hash must be printable text"),
        (fields(model_id="a\nb"), "header: model_id must be printable text"),
        (fields(num_documents=0), "header: num_documents must be a number in"),
        (fields(num_documents=2), "header: num_documents must be a number in"),
        (fields(num_tokens=10**12), "header: num_tokens must be a number in"),
        (fields(num_tokens=None), "header: num_tokens must be a number in"),
    ],
)
def test_a_wrong_header_is_an_error_that_names_the_field(header: object, message: str) -> None:
    with pytest.raises(PriorFileError, match=message):
        parse_prior(sealed(header, BODY))


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (fields(), b"no zlib", "cannot be unpacked"),
        (fields(), BODY[:-1], "must come to the 12 bytes"),
        (fields(), BODY + b"x", "must come to the 12 bytes"),
        (fields(), packed(2, 5), "must come to the 12 bytes"),
        (fields(), packed(2, 5, 6, 7), "must come to the 12 bytes"),
        (fields(), packed(3, 5, 6), "must have 2 tokens together, have 3"),
        (fields(), packed(1, 5, 6), "must have 2 tokens or more, got 1"),
        (fields(), packed(2, 5, 100), r"in \[0, 100\), got 100"),
        (fields(), packed(2, -1, 5), r"in \[0, 100\), got -1"),
        (fields(num_documents=2, num_tokens=4), packed(-4, 8, 1, 2, 3, 4), "must have 4 tokens together"),
    ],
)
def test_a_wrong_body_is_an_error(header: object, body: bytes, message: str) -> None:
    with pytest.raises(PriorFileError, match=message):
        parse_prior(sealed(header, body))


@pytest.mark.parametrize(
    ("num_tokens", "unpacked_bytes"), [(2, 64 << 20), (1 << 20, 64 << 20), (prior_file.MAX_NUM_TOKENS, 0)]
)
def test_no_more_is_unpacked_than_is_announced_and_no_more_allocated_than_is_there(
    num_tokens: int, unpacked_bytes: int
) -> None:
    bomb = sealed(fields(num_tokens=num_tokens), zlib.compress(bytes(unpacked_bytes)))
    tracemalloc.start()
    try:
        with pytest.raises(PriorFileError, match="must come to the"):
            parse_prior(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * min(4 * num_tokens, unpacked_bytes) + (1 << 20)


def test_announced_sizes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prior"
    for header_len, body_len in ((1 << 31, 10), (10, 1 << 62)):
        path.write_bytes(struct.pack("<8sIIQ", prior_file.MAGIC, prior_file.VERSION, header_len, body_len))
        with pytest.raises(PriorFileError, match="corrupt: announces a header of"):
            read_prior(path)
    path.write_bytes(struct.pack("<8sIIQ", prior_file.MAGIC, prior_file.VERSION, 10, 10))
    os.truncate(path, prior_file.MAX_FILE_BYTES + 1)  # sparse: it takes no space
    with pytest.raises(PriorFileError, match="bytes, a prior file at most"):
        read_prior(path)


def test_errors_name_the_file(tmp_path: Path) -> None:
    for name, message in (("none", "No such file"), ("", "is not a file"), ("text", "is not a prior file")):
        (tmp_path / "text").write_text("{}")
        with pytest.raises(PriorFileError, match=message) as caught:
            read_prior(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "num_tokens must be"),
        ([[1]], "num_tokens must be"),
        ([[1, 2, 3], [1]], "2 tokens or more, got 1"),
        ([[1, VOCAB_SIZE]], "token ids must be in"),
        ([[1, -1]], "token ids must be in"),
        ([[1, 2**40]], "token ids must be in"),
    ],
)
def test_nothing_is_written_that_could_not_be_read(documents: list[list[int]], message: str, tmp_path: Path) -> None:
    with pytest.raises(PriorFileError, match=message):
        write_prior(tmp_path / "prior", HEADER, documents)
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_whole_and_alone_and_replaces_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "prior"
    path.write_text("former")
    assert write_prior(path, HEADER, DOCUMENTS) == path.stat().st_size
    assert [list(document) for document in read_prior(path).documents] == DOCUMENTS
    assert list(tmp_path.iterdir()) == [path]
    (ordinary := tmp_path / "ordinary").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_a_write_that_fails_leaves_what_was_there(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: int) -> None:
        raise failure

    (path := tmp_path / "prior").write_text("former")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(type(failure)):
        write_prior(path, HEADER, DOCUMENTS)
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_or_a_folder_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("", "is a folder"), ("pipe", "is something else"), ("no/folder", "in a folder that exists")):
        with pytest.raises(PriorFileError, match=message):
            write_prior(tmp_path / name, HEADER, DOCUMENTS)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_the_documents_of_a_prompt_take_few_bytes(tmp_path: Path) -> None:
    """Ten rounds that mostly repeat one another, over a vocabulary of 16-bit ids and more."""
    document = [(i * 7919) % VOCAB_SIZE for i in range(128)]
    documents = [document[i:] + document[:i] for i in range(10)]
    assert write_prior(tmp_path / "prior", HEADER, documents) < 1280
