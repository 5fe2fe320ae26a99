"""Metrics of peers: whether they are up, the bytes to and from them, and the lost streams."""

from __future__ import annotations

from outrider.core.statistics import Traffic
from outrider.peers.channel import PeerState, read_peers
from tests.support.metric_values import values_of
from tests.support.scripted_speculator import Listener, ScriptedSpeculator, dialling, serving, speculate
from tests.support.waiting import until


async def test_a_peer_that_went_and_came_back_is_up_and_was_tried_again() -> None:
    speculator, listener = ScriptedSpeculator(), Listener()
    async with serving(speculator) as address:
        pass  # an address that nobody else knows
    async with dialling(address) as peer:
        states = [peer.state]
        assert values_of(read_peers(states))["outrider_peer_up"] == {"speculator": 0}
        stream = speculate(peer, listener)
        async with serving(speculator, address):
            await until(lambda: listener.num_drafts)
            assert values_of(read_peers(states))["outrider_peer_up"] == {"speculator": 1}
        await until(lambda: not peer.state.is_connected)
        num_drafts, before = listener.num_drafts, values_of(read_peers(states))
        assert before["outrider_peer_up"] == {"speculator": 0}
        async with serving(speculator, address):
            await until(lambda: listener.num_drafts > num_drafts)
            values = values_of(read_peers(states))
            assert values["outrider_peer_up"] == {"speculator": 1}
            assert values["outrider_stream_reconnects_total"]["speculator"] >= 1
            # They include the bytes of the probes for its return.
            wire = values["outrider_wire_bytes_total"]
            assert wire["speculator,sent"] >= speculator.num_bytes_heard > 0
            assert wire["speculator,received"] >= speculator.num_bytes_said > 0
            stream.close()


async def test_peers_of_one_name_are_one_and_those_that_dial_us_have_only_bytes() -> None:
    states = [PeerState("upstream", f"127.0.0.1:{port}") for port in (1, 2)]
    states[1].up()
    for state in states:
        state.num_reconnects, state.num_shed_tokens = 2, 3
        state.traffic.num_bytes_sent = 5
    values = values_of(read_peers(states, {"caller": Traffic(7, 11)}))
    assert values == {
        "outrider_peer_up": {"upstream": 1},
        "outrider_stream_reconnects_total": {"upstream": 4},
        "outrider_shed_tokens_total": {"upstream": 6},
        "outrider_wire_bytes_total": {
            "upstream,sent": 10,
            "upstream,received": 0,
            "caller,sent": 7,
            "caller,received": 11,
        },
    }
    for state in states:
        await state.close()
