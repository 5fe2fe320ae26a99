"""Names of the protocol's enums, as options and reports have them: in lower case with dashes, without the prefix."""

from __future__ import annotations

from enum import Enum

from google.protobuf.descriptor import EnumDescriptor

from outrider.v1 import types_pb2


def method_name(number: int) -> str:
    """Returns the name of a method: "best-first" for METHOD_BEST_FIRST, the number for one that is not known here."""
    return enum_name(types_pb2.Method.DESCRIPTOR, number)


def enum_number(enum: EnumDescriptor, value: object, what: str) -> int:
    """Returns the number of an enum's value on the wire.

    Args:
        enum: The enum of the protocol.
        value: A name like "best-first" or "TENANT", a member of the enum in `outrider.core`, or the number itself.
        what: The name of the option, for the error.

    Raises:
        ValueError: There is no value of this name.
    """
    # A number goes out as it is, also one that only a newer server knows.
    if isinstance(value, int):
        return value
    given = value.name if isinstance(value, Enum) else value
    name = given.upper().replace("-", "_") if isinstance(given, str) else ""
    known = enum.values_by_name.get(_prefix(enum) + name)
    # 0 is UNSPECIFIED, which is said by leaving the option out.
    if known is None or known.number == 0:
        names = ", ".join(enum_name(enum, number) for number in enum.values_by_number if number)
        raise ValueError(f"{what} must be one of {names}, got {value!r}")
    return known.number


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Returns the name of an enum's value, in lower case with dashes; the number for one that is not known here."""
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(_prefix(enum)).lower().replace("_", "-") if known is not None else str(number)


def _prefix(enum: EnumDescriptor) -> str:
    """Returns the prefix of every name of the enum: its value 0 is always named PREFIX_UNSPECIFIED."""
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
