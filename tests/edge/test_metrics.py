"""An edge's counts: what its applications get, and what it drafts for them."""

from __future__ import annotations

import pytest

from outrider_cli.links.delay_proxy import DelayProxy
from outrider_client.client import Client
from tests.support.metric_values import above_0, values_of
from tests.support.services import RunningEdge, RunningVerifier, draft_model, running_edge, running_verifier

TEXT = "class TestParser(unittest.TestCase):\n    def test_"


async def test_generations_and_drafts_are_counted_on_both_sides(
    client: Client, verifier: RunningVerifier, edge: RunningEdge
) -> None:
    result = await client.complete(TEXT, seed=11, max_tokens=48, ignore_eos=True, method="speculative")
    assert await verifier.is_idle()
    assert await edge.is_idle()
    here, cloud = values_of(edge.service.metrics()), values_of(verifier.servicer.metrics())
    assert here["outrider_edge_requests_total"] == cloud["outrider_requests_total"] == {"OK,length": 1, "OK,stop": 0}
    assert here["outrider_edge_time_to_first_token_seconds"]["count"] == 1
    for name in ("request_duration_seconds", "inter_token_latency_seconds", "inter_chunk_latency_seconds"):
        assert here[f"outrider_edge_{name}"]["count"] == cloud[f"outrider_{name}"]["count"] > 0
    assert here["outrider_edge_request_duration_seconds"]["sum"] > cloud["outrider_request_duration_seconds"]["sum"]
    assert (here["outrider_peer_up"], here["outrider_edge_degraded_sessions_total"][""]) == ({"upstream": 1}, 0)
    assert here["outrider_draft_sessions_total"][""] == 1
    assert here["outrider_draft_committed_tokens_total"][""] >= result.summary.num_accepted_tokens > 0
    # A summary does not count itself; and not everything that the edge sends belongs to the generation.
    caller, upstream = cloud["outrider_wire_bytes_total"], here["outrider_wire_bytes_total"]
    assert upstream["upstream,received"] > caller["caller,sent"] > result.summary.num_bytes_sent > 0
    assert upstream["upstream,sent"] >= caller["caller,received"] >= result.summary.num_bytes_received > 0


@pytest.mark.slow
async def test_a_generation_that_goes_on_at_another_verifier_is_one_and_a_reconnect(
    verifier: RunningVerifier,
) -> None:
    async with (
        running_verifier() as second,
        DelayProxy(verifier.address) as proxy,
        running_edge(proxy.address, second.address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        generation = client.generate(TEXT, seed=3, max_tokens=200, ignore_eos=True, method="pearl")
        await anext(generation)
        await proxy.close()
        async for _ in generation:
            pass
        assert generation.result.num_output_tokens == 200
        assert await second.is_idle()
        assert await edge.is_idle()
        here, there = values_of(edge.service.metrics()), values_of(second.servicer.metrics())
    assert above_0(here["outrider_edge_requests_total"]) == {"OK,length": 1}
    assert here["outrider_stream_reconnects_total"] == {"upstream": 1}
    # If a draft in flight hides how a call has ended, the verifier is asked for the rest, or only for the end.
    assert here["outrider_draft_resyncs_total"][""] >= 1
    assert there["outrider_resumed_sessions_total"][""] >= 1


async def test_without_its_draft_model_an_edge_says_that_generations_are_degraded(verifier: RunningVerifier) -> None:
    async with running_edge(verifier.address) as edge, Client(edge.address) as client:
        await client.complete(TEXT, max_tokens=8, ignore_eos=True, method="pearl")
        values = values_of(edge.service.metrics())
    assert values["outrider_edge_degraded_sessions_total"][""] == 1
    assert values["outrider_edge_draft_model_ready"][""] == 0
    assert not any(name.startswith("outrider_draft_") for name in values)
