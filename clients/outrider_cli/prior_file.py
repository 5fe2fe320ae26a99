"""Prior files: documents of token ids for the retrieval-datastore, with the origin of the ids.

    offset      bytes
    0           8        magic
    8           4        version of the format
    12          4        length of the header, in bytes
    16          8        length of the body, in bytes
    24          header   JSON: the fields of PriorHeader, num_documents, num_tokens
    then        body     zlib: the lengths of the documents, 4 bytes each, then all their token ids, 4 bytes each
    then        32       SHA-256 of everything before it

All numbers are little-endian. zlib finds the runs of tokens that come again, so the documents of one prompt should
stand together. A file may come from anywhere: nothing that it says is believed, or allocated, before its checksum was
checked, and nothing is unpacked beyond what its header announces.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.version import __version__

MAGIC = b"OUTPRIOR"
VERSION = 1
MAX_NUM_TOKENS = 1 << 26
"""Most tokens in a file: 256 MiB of ids. A prior that helps is a hundredth of it."""
MAX_NUM_DOCUMENTS = 1 << 20
MIN_DOCUMENT_LEN = 2
"""A single token is followed by nothing, so it makes no n-gram."""
MAX_HEADER_BYTES = 1 << 16
# 4 bytes a token for its id, and at most 2 for lengths, as a document has two tokens or more; the rest is room for the
# header, and for what zlib adds where it finds nothing to pack.
MAX_FILE_BYTES = 8 * MAX_NUM_TOKENS

_PREFIX = struct.Struct("<8sIIQ")
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MAX_VOCAB_SIZE = 2**31  # ids are int32 on the wire
_ID, _LENGTH = "i", "I"  # type codes of 4 bytes


class PriorFileError(ValueError):
    """A file is no prior, or not a whole one. The message names the fault, in one line."""


@dataclass(frozen=True, slots=True)
class PriorHeader:
    """Names the origin of a prior. Raises PriorFileError for values that no prior can have."""

    tokenizer_hash: str
    """The hash of `ModelInfo.tokenizer_hash`: files of another tokenizer are of no use."""
    vocab_size: int
    """Every token id is below it."""
    model_id: str
    """The model that generated the documents."""
    rounds: int
    """Number of continuations of each prompt."""
    created_by: str = f"outrider {__version__}"
    """The program that wrote the file."""

    def __post_init__(self) -> None:
        for name in ("tokenizer_hash", "model_id", "created_by"):
            text = getattr(self, name)
            _check(isinstance(text, str) and text != "" and text.isprintable(), name, "printable text", text)
        _check_number("vocab_size", self.vocab_size, 1, _MAX_VOCAB_SIZE)
        _check_number("rounds", self.rounds, 1, 2**31)


@dataclass(frozen=True, slots=True)
class Prior:
    """Holds the contents of a prior file."""

    header: PriorHeader
    documents: tuple[array[int], ...]
    """Token ids: int32, two or more in each."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(map(len, self.documents))


def write_prior(path: Path, header: PriorHeader, documents: Sequence[Sequence[int]]) -> int:
    """Writes a prior file, replacing one that is there, and returns its size in bytes.

    The file appears under its name when it is complete and on disk, or not at all.

    Raises:
        PriorFileError: no file can be there; there are no documents, or too many tokens; a document is too short; a
            token id is outside the vocabulary.
        OSError: it cannot be written.
    """
    check_destination(path)
    data = format_prior(header, documents)
    # Next to it, for a rename must not cross file systems; not by `tempfile`, whose files no other user can read.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else the machine may crash with the name on disk and the contents not.
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        # After the rename it is not there any more.
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
    return len(data)


def check_destination(path: Path) -> None:
    """Raises PriorFileError if no file can be written there. A rename onto a device would replace the device."""
    if path.exists() and not path.is_file():
        raise PriorFileError(f"{path}: must be a file, is {'a folder' if path.is_dir() else 'something else'}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise PriorFileError(f"{path}: must be in a folder that exists and can be written to")


def read_prior(path: Path) -> Prior:
    """Reads and checks a prior file. Raises PriorFileError, which names the file, for everything that can be wrong."""
    try:
        return parse_prior(_contents(path))
    except PriorFileError as error:
        raise PriorFileError(f"{path}: {error}") from None
    except OSError as error:
        raise PriorFileError(f"{path}: {error.strerror or error}") from None


def format_prior(header: PriorHeader, documents: Sequence[Sequence[int]]) -> bytes:
    """Returns a prior file's bytes; the same documents give the same bytes. Raises PriorFileError as `write_prior`."""
    lengths = array(_LENGTH, map(len, documents))
    num_tokens = sum(lengths)
    counts = {"num_documents": len(lengths), "num_tokens": num_tokens}
    _check_counts(**counts)
    _check_lengths(lengths, num_tokens)
    ids = array(_ID)
    for document in documents:
        try:
            ids.extend(document)
        except OverflowError:  # an id that does not fit into 4 bytes; all others are checked below, together
            raise PriorFileError(f"token ids must be in [0, {header.vocab_size})") from None
    _check_ids(ids, header.vocab_size)
    text = json.dumps(asdict(header) | counts).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise PriorFileError(f"the header must be at most {MAX_HEADER_BYTES} bytes, got {len(text)}")
    body = zlib.compress(_little_endian(lengths).tobytes() + _little_endian(ids).tobytes(), level=9)
    data = _PREFIX.pack(MAGIC, VERSION, len(text), len(body)) + text + body
    return data + hashlib.sha256(data).digest()


def parse_prior(data: bytes) -> Prior:
    """Parses a prior file's bytes. Raises PriorFileError, which does not name the file."""
    header_len, size = _announced(data[: _PREFIX.size])
    if len(data) < size:
        raise PriorFileError(f"truncated: has {len(data)} of {size} bytes")
    if len(data) > size:
        raise PriorFileError(f"corrupt: has more than the {size} bytes that it announces")
    # A view: a slice would be a second copy of up to half a gigabyte.
    if hashlib.sha256(memoryview(data)[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise PriorFileError("corrupt: the checksum is not that of the contents")
    body_start = _PREFIX.size + header_len
    header, num_documents, num_tokens = _parse_header(data[_PREFIX.size : body_start])
    body = _unpacked(memoryview(data)[body_start:-_CHECKSUM_BYTES], 4 * (num_documents + num_tokens))
    lengths, ids = array(_LENGTH), array(_ID)
    # `_unpacked` has made sure that the body has as many bytes as these counts say.
    lengths.frombytes(body[: 4 * num_documents])
    ids.frombytes(body[4 * num_documents :])
    _check_lengths(_little_endian(lengths), num_tokens)
    _check_ids(_little_endian(ids), header.vocab_size)
    documents, start = [], 0
    for length in lengths:
        documents.append(ids[start : start + length])
        start += length
    return Prior(header, tuple(documents))


def _contents(path: Path) -> bytes:
    """Reads a file, unless it announces no prior or is larger than any prior: it may be huge."""
    if path.exists() and not path.is_file():
        raise PriorFileError("is not a file")
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        _announced(prefix)
        # Of the open file: its name may stand for another one by now.
        actual = os.fstat(file.fileno()).st_size
        if actual > MAX_FILE_BYTES:
            raise PriorFileError(f"has {actual} bytes, a prior file at most {MAX_FILE_BYTES}")
        return prefix + file.read(max(0, actual - len(prefix)))


def _announced(prefix: bytes) -> tuple[int, int]:
    """Returns the length of the header, and the size of the whole file, from the first bytes."""
    # A file that was cut within the magic is a truncated prior, not something else.
    if not prefix or not MAGIC.startswith(prefix[: len(MAGIC)]):
        raise PriorFileError("is not a prior file")
    if len(prefix) < _PREFIX.size:
        raise PriorFileError(f"truncated: has {len(prefix)} bytes, a prior file at least {_PREFIX.size}")
    _, version, header_len, body_len = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise PriorFileError(f"has version {version} of the format, this program knows version {VERSION}")
    size = _PREFIX.size + header_len + body_len + _CHECKSUM_BYTES
    if header_len > MAX_HEADER_BYTES or size > MAX_FILE_BYTES:
        raise PriorFileError(
            f"corrupt: announces a header of {header_len} bytes (at most {MAX_HEADER_BYTES}) in a file of {size} "
            f"(at most {MAX_FILE_BYTES})"
        )
    return header_len, size


def _parse_header(text: bytes) -> tuple[PriorHeader, int, int]:
    """Returns the header, the number of documents, the number of tokens."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: 64 KiB of brackets
        raise PriorFileError("the header must be JSON") from None
    names = {*PriorHeader.__dataclass_fields__, "num_documents", "num_tokens"}
    if not isinstance(fields, dict) or fields.keys() != names:
        raise PriorFileError(f"the header must be an object with {', '.join(sorted(names))}")
    counts = {name: fields.pop(name) for name in ("num_documents", "num_tokens")}
    try:
        _check_counts(**counts)
        return PriorHeader(**fields), counts["num_documents"], counts["num_tokens"]
    except PriorFileError as error:
        raise PriorFileError(f"header: {error}") from None


def _unpacked(body: memoryview, size: int) -> bytes:
    """Returns the body, unpacked. It must come to `size` bytes, and is unpacked no further than that."""
    stream = zlib.decompressobj()
    try:
        # One byte more than announced: enough to notice a larger body, without unpacking all of it.
        data = stream.decompress(body, size + 1)
    except zlib.error as error:
        raise PriorFileError(f"the body cannot be unpacked ({error})") from None
    if len(data) != size or not stream.eof or stream.unused_data:
        raise PriorFileError(f"the body must come to the {size} bytes that the header announces")
    return data


def _little_endian(numbers: array[int]) -> array[int]:
    """Converts in place from the byte order of this machine to that of the file, or back."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _check_counts(num_documents: object, num_tokens: object) -> None:
    _check_number("num_tokens", num_tokens, MIN_DOCUMENT_LEN, MAX_NUM_TOKENS)
    assert isinstance(num_tokens, int)
    _check_number("num_documents", num_documents, 1, min(MAX_NUM_DOCUMENTS, num_tokens // MIN_DOCUMENT_LEN))


def _check_lengths(lengths: array[int], num_tokens: int) -> None:
    # Never empty, nor are the ids below: `_check_counts` has been here first.
    if min(lengths) < MIN_DOCUMENT_LEN:
        raise PriorFileError(f"a document must have {MIN_DOCUMENT_LEN} tokens or more, got {min(lengths)}")
    if sum(lengths) != num_tokens:
        raise PriorFileError(f"the documents must have {num_tokens} tokens together, have {sum(lengths)}")


def _check_ids(ids: array[int], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise PriorFileError(f"token ids must be in [0, {vocab_size}), got {wrong}")


def _check_number(name: str, value: object, least: int, most: int) -> None:
    # JSON's true is an int to Python.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    _check(is_number and least <= value <= most, name, f"a number in [{least}, {most}]", value)  # type: ignore[operator]


def _check(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise PriorFileError(f"{name} must be {rule}, got {value!r:.80}")
