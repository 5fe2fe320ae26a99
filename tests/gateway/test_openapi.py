"""The description of the API has every path, and every parameter that a request may have."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from outrider_gateway import app
from outrider_gateway.dialects.chat import ChatParameters
from outrider_gateway.dialects.completions import CompletionParameters
from outrider_gateway.openapi import document
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import running_gateway

UNTOLD = {"/", "/metrics", "/openapi.json", "/page/load", "/page/lab", "/page/{path}"}
"""Paths that are no part of the API."""


async def test_every_path_of_the_api_is_described(verifier: FakeVerifier, monkeypatch: Any) -> None:
    routes: list[Route] = []
    monkeypatch.setattr(app, "Route", lambda *given, **more: routes.append(Route(*given, **more)) or routes[-1])
    async with running_gateway(verifier.address) as gateway:
        told = (await gateway.http.get("/openapi.json")).json()
    assert told == document()
    served = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods or ()}
    described = {(path, method) for path, methods in told["paths"].items() for method in methods}
    assert described == {(path, method) for path, method in served if path not in UNTOLD and method != "head"}


def test_every_parameter_is_described() -> None:
    schemas = document()["components"]["schemas"]
    for kind in (ChatParameters, CompletionParameters):
        assert schemas[kind.__name__]["properties"].keys() == kind.model_fields.keys()
    assert schemas["CompletionParameters"]["required"] == ["prompt"]
    assert {"type": "string"} in schemas["ChatParameters"]["properties"]["stop"]["anyOf"]
