"""A plain request parameter is named in the proto and in the dataclass, and nowhere in between."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.v1 import types_pb2
from outrider.wire.speculation import scalars_from_proto, scalars_to_proto

PAIRS: list[tuple[type[Message], type[Any]]] = [
    (types_pb2.SamplingParams, SamplingParams),
    (types_pb2.SpeculationParams, SpeculationParams),
]
RESOLVED_ELSEWHERE = {"allow_fallback", "max_tokens", "ignore_eos", "include_stop_str_in_output"}
"""For admission and for the end of the session: parameters neither of the drafting nor of a draw."""
OTHERS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.25, "min_path_probability": 0.5}
"""Values other than the default, for fields where 2 is out of range or not exact."""


def scalars(message: type[Message]) -> list[FieldDescriptor]:
    """The fields of a message that are plain values."""
    kinds = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM)
    return [field for field in message.DESCRIPTOR.fields if not field.is_repeated and field.type not in kinds]


@pytest.mark.parametrize(("message", "params"), PAIRS)
def test_every_scalar_has_its_counterpart(message: type[Message], params: type[Any]) -> None:
    names = {field.name for field in scalars(message)}
    assert names
    assert names - RESOLVED_ELSEWHERE <= {field.name for field in fields(params)}
    assert all(field.has_presence for field in scalars(message)), "unset and 0 must differ"


@pytest.mark.parametrize(("message", "params"), PAIRS)
def test_every_scalar_goes_there_and_back(message: type[Message], params: type[Any]) -> None:
    defaults = params()
    given = {}
    for field in scalars(message):
        if field.name not in RESOLVED_ELSEWHERE:
            default = getattr(defaults, field.name)
            given[field.name] = not default if isinstance(default, bool) else OTHERS.get(field.name, 2)
            assert given[field.name] != default
    sent = message(**given)
    assert scalars_from_proto(sent, params) == given
    assert scalars_from_proto(message(), params) == {}
    back = message()
    scalars_to_proto(defaults, back)
    expected = {name: getattr(defaults, name) for name in given}
    assert scalars_from_proto(back, params) == expected, "set, even to 0 and false"
