"""What a service knows of the peers that it dials, under the names that Prometheus knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.core.statistics import Traffic
from outrider.rpc.metrics import Metric, Metrics, counters, gauges
from outrider.rpc.peer_state import PeerState


def read_peers(states: Sequence[PeerState], others: Mapping[str, Traffic] | None = None) -> Metrics:
    """Of each peer: whether it answers, its streams, its bytes. `others` are bytes to and from those that dial us, by
    what they are. Safe to call in any thread."""
    names = sorted({state.name for state in states})
    yield gauges(
        "outrider_peer_up",
        "Whether the peer answered when it was last needed; of several that stand in for another, whether any did.",
        "peer",
        {name: any(state.is_connected for state in states if state.name == name) for name in names},
    )
    yield counters(
        "outrider_stream_reconnects_total",
        "Streams to the peer that were lost, and tried again.",
        "peer",
        {name: sum(state.num_reconnects for state in states if state.name == name) for name in names},
    )
    yield counters(
        "outrider_shed_tokens_total",
        "Tokens that the peer was to record, and that were given up.",
        "peer",
        {name: sum(state.num_shed_tokens for state in states if state.name == name) for name in names},
    )
    yield _wire_bytes([*((state.name, state.traffic) for state in states), *(others or {}).items()])


def _wire_bytes(traffics: Sequence[tuple[str, Traffic]]) -> Metric:
    values: dict[tuple[str, ...], float] = {}
    for name, traffic in traffics:
        sent, received = (name, "sent"), (name, "received")
        values[sent] = values.get(sent, 0) + traffic.num_bytes_sent
        values[received] = values.get(received, 0) + traffic.num_bytes_received
    description = "Bytes of the messages to and from the peer, without the frames around them."
    return Metric("outrider_wire_bytes_total", description, "counter", ("peer", "direction"), values)
