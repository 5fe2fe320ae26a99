"""A gateway tells callers that the verifier does not know nothing of the model, its load, or its other callers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import RunningGateway, events_of, running_gateway

KNOWN = {"authorization": "Bearer known"}


@pytest.fixture
async def gateway(verifier: FakeVerifier, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """It has a token of its own, with which it has learned the model."""
    own = tmp_path / "token"
    own.write_text("own")
    verifier.tokens, verifier.model_id = {"own", "known"}, "secret/model"
    async with running_gateway(verifier.address, peer_token_file=str(own)) as running:
        assert (await running.http.get("/v1/models", headers=KNOWN)).status_code == 200
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_only_a_caller_that_is_known_learns_the_models_name_from_a_wrong_one(
    gateway: RunningGateway, path: str, body: dict[str, object]
) -> None:
    stranger = await gateway.post(path, **body, model="other")
    assert stranger.status_code == 401
    assert "secret/model" not in stranger.text
    known = await gateway.http.post(path, json={**body, "model": "other"}, headers=KNOWN)
    assert known.status_code == 404
    assert "secret/model is" in known.text


async def test_the_load_is_told_to_those_who_are_known_as_long_as_they_are(
    verifier: FakeVerifier, gateway: RunningGateway
) -> None:
    stranger = await gateway.http.get("/page/load")
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (401, "invalid_api_key")
    async with gateway.http.stream("GET", "/page/load", headers=KNOWN) as response:
        assert response.status_code == 200
        verifier.tokens = set()
        told = events_of("".join([piece async for piece in response.aiter_text()]).replace("event: load\n", ""))
    assert '"num_sessions"' in told[0]
    assert "invalid_api_key" in told[-1]


async def test_metrics_are_told_to_those_who_are_known_where_the_gateway_has_a_token(gateway: RunningGateway) -> None:
    assert (await gateway.http.get("/metrics")).status_code == 401
    metrics = await gateway.http.get("/metrics", headers=KNOWN)
    assert metrics.status_code == 200
    assert metrics.headers["x-content-type-options"] == "nosniff"
