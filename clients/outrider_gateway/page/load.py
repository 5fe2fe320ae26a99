"""GET /page/load: events about the server, twice a second, which the page shows next to its texts."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from outrider.v1 import verifier_pb2
from outrider_client.enums import method_name
from outrider_client.errors import OutriderError
from outrider_gateway.errors import from_upstream
from outrider_gateway.exchange import Exchange
from outrider_gateway.outputs import unless_gone
from outrider_gateway.streams import STREAM_HEADERS, event_of

PERIOD_S = 0.5


async def load(exchange: Exchange) -> None:
    """Sends the load of the verifier until the client or the gateway ends. Raises ApiError, ClientGone."""
    fields = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
    first = await _event(exchange)
    await exchange.send({"type": "http.response.start", "status": 200, "headers": fields})
    await unless_gone(exchange.receive, _events(exchange, first))
    await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(exchange: Exchange, event: bytes) -> None:
    is_draining = exchange.gateway.is_draining
    while not is_draining.is_set():
        await _send(exchange, event)
        try:
            await asyncio.wait_for(is_draining.wait(), PERIOD_S)
        except TimeoutError:
            try:
                event = await _event(exchange)
            except OutriderError as error:
                await _send(exchange, _load(from_upstream(error).envelope))
                return


async def _send(exchange: Exchange, event: bytes) -> None:
    await exchange.send({"type": "http.response.body", "body": event, "more_body": True})


async def _event(exchange: Exchange) -> bytes:
    """Returns the current event. Raises OutriderError for a caller that the verifier does not admit."""
    try:
        told = _told(await exchange.upstream.info(exchange.token), exchange.metrics.num_running)
    except OutriderError as error:
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise  # waiting would not help; a peer that is away may come back
        told = from_upstream(error).envelope
    return _load(told)


def _load(told: dict[str, Any]) -> bytes:
    return event_of(told, "load")


def _told(info: verifier_pb2.GetInfoResponse, num_requests: int) -> dict[str, Any]:
    return {
        "num_sessions": info.num_sessions,
        "max_num_sessions": info.max_num_sessions,
        "num_queued": info.num_queued,
        "kv_pool": {
            "num_tokens": info.kv_pool.num_tokens,
            "num_held_tokens": info.kv_pool.num_held_tokens,
            "num_cached_tokens": info.kv_pool.num_cached_tokens,
            "block_size": info.kv_pool.block_size,
        },
        "speculators": [_peer(peer) for peer in info.speculators],
        "datastore": _peer(info.datastore) if info.HasField("datastore") else None,
        "model": {
            "id": info.model.model_id,
            "dtype": info.model.dtype,
            "vocab_size": info.model.vocab_size,
            "context_len": info.model.max_context_len,
            # The included ones have a template, but were trained on code alone.
            "is_chat": bool(info.chat_template) and not info.model.model_id.startswith("demo/"),
        },
        "methods": [method_name(method) for method in info.methods],
        "default_method": method_name(info.default_method),
        "num_requests": num_requests,
    }


def _peer(peer: verifier_pb2.PeerInfo) -> dict[str, Any]:
    # Numbers of 64 bits are kept: protobuf's JSON would make strings of them.
    told = MessageToDict(peer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {**told, "num_shed_tokens": peer.num_shed_tokens}
