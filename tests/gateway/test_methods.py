"""Gateway and client offer methods by the methods' own descriptions."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any, cast

import pytest

from outrider.core.methods import METHODS
from outrider.core.speculation import Method, MethodParams, SpeculationLimits, SpeculationParams
from outrider.wire.speculation import speculation_from_proto
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import running_gateway


def other_than(default: Any) -> Any:
    """A valid value that is not the default. None if no other value is valid by itself."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default - 1 if default > 1 else 2
    if isinstance(default, float):
        return 0.5
    if isinstance(default, Enum):
        return list(type(default))[1]
    return default[:1] or None


def as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [as_json(each) for each in value]
    return value.name.lower() if isinstance(value, Enum) else value


@pytest.mark.parametrize("method", [method for method in METHODS.values() if method.parameters])
async def test_each_of_a_method_s_own_parameters_comes_through_gateway_client_and_wire(
    verifier: FakeVerifier, method: Method
) -> None:
    kind = cast(type[MethodParams], method.parameters)
    others = {each.name: other_than(getattr(kind(), each.name)) for each in fields(cast(Any, kind))}
    others = {
        name: value
        for name, value in others.items()
        if value is not None and name not in dict(kind().meaningless({name}, is_ratio=method.samples))
    }
    rule = {"acceptance_rule": "ratio"} if method.samples else {}
    async with running_gateway(verifier.address) as gateway:
        for name, value in others.items():
            asked = {"method": method.name, method.field: {name: as_json(value)}, **rule}
            answered = await gateway.post("/v1/completions", prompt="hello", speculation=asked)
            assert answered.status_code == 200, answered.text
    found = [
        speculation_from_proto(request.speculation, SpeculationParams(), SpeculationLimits()).of(kind)
        for request in verifier.requests
    ]
    assert others
    assert found == [kind(**{name: value}) for name, value in others.items()]


async def test_the_page_has_a_legend_of_every_method(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address) as gateway:
        answered = await gateway.http.get("/page/methods.json")
        style = (await gateway.http.get("/page/page.css")).text
    assert answered.headers["content-type"] == "application/json"
    legend = answered.json()
    assert [each["name"] for each in legend] == list(METHODS)
    assert all(each["meaning"] and f"--{each['colour']}:" in style for each in legend)
