"""Which sites' pages may use a gateway, and which host names it answers to: a browser must not be used against its
user."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from outrider_gateway.settings import GatewaySettings
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.raw_http import exchanged

PATHS = ("/v1/models", "/page/load", "/page/lab", "/", "/metrics", "/health", "/nothing")


@pytest.fixture
async def gateway(verifier: FakeVerifier) -> AsyncIterator[RunningGateway]:
    async with running_gateway(verifier.address, allow_host="box.example", allow_origin="https://a.example") as running:
        yield running


async def status(gateway: RunningGateway, path: str, **headers: str) -> int:
    return (await gateway.http.get(path, headers=headers)).status_code


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "10.0.0.1", "0.0.0.0:8000", "unix:8000", "localhost,evil", ""]
)
async def test_by_a_name_that_is_not_its_own_a_gateway_of_this_machine_tells_nothing(
    gateway: RunningGateway, host: str
) -> None:
    for path in PATHS:
        assert await status(gateway, path, host=host) == 403
    refused = await gateway.http.post("/v1/completions", json={"prompt": "a"}, headers={"host": host})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "box.example:9"]
)
async def test_by_names_of_this_machine_and_allowed_ones_it_answers(gateway: RunningGateway, host: str) -> None:
    assert await status(gateway, "/v1/models", host=host) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "https://a.example:80", "x"])
async def test_pages_of_others_may_use_nothing(gateway: RunningGateway, origin: str) -> None:
    for path in PATHS:
        assert await status(gateway, path, origin=origin) == 403
    head = {"origin": origin}
    refused = await gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=head)
    assert refused.status_code == 403
    assert "--allow-origin" in refused.json()["error"]["message"]


async def test_its_own_page_and_those_that_are_allowed_may_use_it(gateway: RunningGateway) -> None:
    for origin in (f"http://{gateway.address}", "https://a.example"):
        assert await status(gateway, "/v1/models", origin=origin) == 200


async def test_what_others_can_reach_answers_by_any_name_unless_it_is_told_its_own(verifier: FakeVerifier) -> None:
    reachable = {"listen": "0.0.0.0:0", "insecure": True}
    async with running_gateway(verifier.address, **reachable) as gateway:
        assert await status(gateway, "/v1/models", host="box.example") == 200
        assert await status(gateway, "/v1/models", origin="https://evil.example") == 403
    async with running_gateway(verifier.address, **reachable, allow_host="box.example") as gateway:
        assert await status(gateway, "/v1/models", host="box.example:80") == 200
        assert await status(gateway, "/v1/models", host="10.1.2.3:80") == 200, "as probes ask"
        assert await status(gateway, "/v1/models", host="evil.example") == 403


@pytest.mark.parametrize(
    ("request_line", "fields", "expected"),
    [
        ("GET /version HTTP/1.1", (), 400),
        ("GET /version HTTP/1.1", ("host: localhost", "host: localhost"), 400),
        ("GET /version HTTP/1.0", ("host: localhost", "host: evil.example"), 400),
        ("GET /version HTTP/1.0", (), 200),
        ("GET /version HTTP/0.9", ("host: localhost",), 400),
        ("GET /version", (), 400),
        ("GET /version HTTP/1.1", ("host: localhost",), 200),
    ],
)
async def test_a_request_names_its_server_once_in_a_version_that_is_spoken(
    gateway: RunningGateway, request_line: str, fields: tuple[str, ...], expected: int
) -> None:
    answer = await exchanged(gateway.address, "\r\n".join((request_line, *fields, "", "")).encode())
    assert answer.status == expected
    assert answer.fields["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "given", [{"allow_host": "a.example:80"}, {"allow_host": "A.example"}, {"allow_origin": "a.example"}]
)
def test_a_name_that_could_never_match_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="must be"):
        GatewaySettings.model_validate(given)
    for value in ("*", "vscode-webview://abc, https://a.example:8"):
        assert GatewaySettings.model_validate({"allow_origin": value}).allow_origin == value
