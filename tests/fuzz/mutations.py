"""Messages that nobody would send on purpose, made from good ones: wrong in their fields, or wrong in their bytes.

Everything is drawn from one `random.Random`: the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTS = (
    *range(-3, 13),
    *(power + near for power in (16, 32, 64, 256, 1024, 2048, 4096, 65536) for near in (-1, 0, 1)),
    *(sign * 2**bits + near for bits in (31, 32, 63, 64) for sign in (-1, 1) for near in (-1, 0)),
)
"""Numbers at the limits of fields."""
DOUBLES = (
    *(0.0, -0.0, 5e-324, 1e-300, 1e-45, 1e-9, 0.1, 0.2, 0.5, 0.7, 0.9, 0.999999999, 1.0, 1.0000001, 1.5, 2.0, 10.0),
    *(100.0, 1e9, 3.4e38, 3.5e38, 1.7e308, -1.0, -1e-9, -1e300, math.inf, -math.inf, math.nan),
)
STRINGS = ("", " ", "a", "\0", "default", "x" * 256, "x" * 257, "\U0001f680" * 300, "{}:%s\r\n", "user", "ü" * 5000)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
MAX_DEPTH = 4
HUGE_LENS = (100, 1000, 5000, 20_000)
HUGEST_LEN = 1_200_000
"""About 5 MB of large token ids, which exceeds the limit of a message."""
MARK = "not\x01UTF-8"


def mutated(message: Message, random: Random, others: Sequence[Message] = ()) -> bytes:
    """The bytes of a message, usually mutated. `others` are spliced in."""
    kind = random.random()
    if kind < 0.1:
        return serialized(message)
    if kind < 0.6:
        return serialized(with_other_fields(message, random))
    if kind < 0.62:
        return _with_invalid_utf8(message, random)
    data = serialized(message if kind < 0.9 else with_other_fields(message, random))
    donor = serialized(random.choice(others)) if others else data
    return with_other_bytes(data, random, donor)


def serialized(message: Message) -> bytes:
    """The bytes of a message, the same each time."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def with_other_fields(message: Message, random: Random) -> Any:
    """A copy with one to four changed fields, at any depth."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        _change_a_field(changed, random, 0)
    return changed


def _change_a_field(message: Any, random: Random, depth: int) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    field = random.choice(present if present and random.random() < 0.6 else fields)
    if _is_map(field):
        _change_a_map(getattr(message, field.name), field, random)
    elif field.is_repeated:
        _change_a_list(getattr(message, field.name), field, random, depth)
    elif field.message_type is None:
        if random.random() < 0.15:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, value_for(field, random))
    elif random.random() < 0.75:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _change_a_field(inner, random, depth + 1)
    elif random.random() < 0.5:
        message.ClearField(field.name)
    else:
        message.ClearField(field.name)
        fill(getattr(message, field.name), random, depth + 1)


def fill(message: Any, random: Random, depth: int = 0) -> None:
    """Sets some of a message's fields to arbitrary values."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.6:
            continue
        if _is_map(field):
            _change_a_map(getattr(message, field.name), field, random)
        elif field.is_repeated:
            _change_a_list(getattr(message, field.name), field, random, depth)
        elif field.message_type is None:
            setattr(message, field.name, value_for(field, random))
        elif depth < MAX_DEPTH:
            fill(getattr(message, field.name), random, depth + 1)


def _is_map(field: FieldDescriptor) -> bool:
    # protobuf represents a map as a list of messages with a key and a value, and that as a dict.
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _change_a_map(values: Any, field: FieldDescriptor, random: Random) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    kind = random.random()
    if kind < 0.2:
        values.clear()
    elif kind > 0.97:
        # Integers as keys, because there are enough of them.
        values.update({number: value_for(value, random) for number in range(random.choice(HUGE_LENS))})
    else:
        values.update({value_for(key, random): value_for(value, random) for _ in range(random.randrange(1, 5))})


def _change_a_list(values: Any, field: FieldDescriptor, random: Random, depth: int) -> None:
    kind = random.random()
    if kind < 0.1:
        del values[:]
    elif kind < 0.3 and values:
        del values[random.randrange(len(values))]
    elif kind < 0.5 and values:
        values.extend(list(values))
    elif kind > 0.97:
        _make_huge(values, field, random)
    elif field.message_type is not None:
        if values and random.random() < 0.6:
            _change_a_field(random.choice(values), random, depth + 1)
        elif depth < MAX_DEPTH:
            fill(values.add(), random, depth + 1)
    elif values and random.random() < 0.6:
        values[random.randrange(len(values))] = value_for(field, random)
    else:
        values.extend(value_for(field, random) for _ in range(random.randrange(1, 5)))


def _make_huge(values: Any, field: FieldDescriptor, random: Random) -> None:
    length = random.choice(HUGE_LENS)
    if field.message_type is not None:
        filled = type(values.add())()
        fill(filled, random, MAX_DEPTH)
        if filled.ByteSize() < 200:
            values.extend([filled] * length)
    elif field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        length = HUGEST_LEN if random.random() < 0.01 else length
        values.extend([value_for(field, random)] * length)


def value_for(field: FieldDescriptor, random: Random) -> Any:
    """A value that the field can hold, whatever it means."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return random.choice(DOUBLES) if random.random() < 0.8 else random.uniform(-1, 2)
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            text = random.choice(STRINGS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    low, high = RANGES[field.cpp_type]
    if field.enum_type is not None and random.random() < 0.7:
        return random.choice(field.enum_type.values).number
    return random.choice([number for number in INTS if low <= number <= high])


# Bytes.


def with_other_bytes(data: bytes, random: Random, donor: bytes) -> bytes:
    """One to three changes that ignore the meaning of the bytes."""
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice(_CHANGES)(data, random, donor)
    return data


def _cut(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 16, len(data))))


def _flipped(data: bytes, random: Random, donor: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _truncated(data: bytes, random: Random, donor: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _without_a_piece(data: bytes, random: Random, donor: bytes) -> bytes:
    start, end = _cut(data, random)
    return data[:start] + data[end:]


def _with_a_piece_twice(data: bytes, random: Random, donor: bytes) -> bytes:
    start, end = _cut(data, random)
    return data[:end] + data[start:]


def _spliced(data: bytes, random: Random, donor: bytes) -> bytes:
    start, end = _cut(donor, random)
    at = random.randrange(len(data) + 1)
    return data[:at] + donor[start:end] + data[at:]


def _with_random_bytes(data: bytes, random: Random, donor: bytes) -> bytes:
    start, end = _cut(data, random)
    return data[:start] + random.randbytes(random.choice((1, 2, 8, 64))) + data[end:]


def _with_a_long_varint(data: bytes, random: Random, donor: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + b"\xff" * random.choice((4, 9, 10, 20)) + b"\x01" + data[at + 1 :]


def _replaced(data: bytes, random: Random, donor: bytes) -> bytes:
    return random.randbytes(random.choice((0, 1, 3, 17, 200)))


_CHANGES: tuple[Callable[[bytes, Random, bytes], bytes], ...] = (
    *(_flipped, _flipped, _flipped, _truncated, _without_a_piece, _with_a_piece_twice, _spliced),
    *(_with_random_bytes, _with_a_long_varint, _replaced),
)


def _with_invalid_utf8(message: Message, random: Random) -> bytes:
    """A copy with a string field whose bytes are not UTF-8, if its type has a string field."""
    marked = with_other_fields(message, random)
    places = list(_strings(marked, 0))
    if places:
        holder, name = random.choice(places)
        setattr(holder, name, MARK)
    return serialized(marked).replace(
        MARK.encode(), random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")).ljust(len(MARK), b"\xfe")
    )


def _strings(message: Any, depth: int) -> Any:
    """Each (message, field name) of a string, in fields that are set and in fields that could be."""
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            yield message, field.name
        elif field.message_type is not None and depth < MAX_DEPTH and message.HasField(field.name):
            yield from _strings(getattr(message, field.name), depth + 1)
