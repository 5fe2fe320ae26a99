"""Peers that were missing while a text was generated, in words for people."""

from __future__ import annotations

from outrider.core.statistics import Absence, Peer
from outrider.v1 import verifier_pb2

PEERS = {
    Peer.SPECULATOR: "the speculator",
    Peer.DATASTORE: "the datastore",
    Peer.EDGE: "the edge's draft model",
}
ABSENCES = {
    Absence.STARTING: "was still starting, or shutting down,",
    Absence.UNREACHABLE: "could not be reached",
    Absence.LOST: "was away",
    Absence.SLOW: "was too slow",
    Absence.FULL: "had no room",
    Absence.UNUSABLE: "could not be used",
}


def missing_in_words(summary: verifier_pb2.SpeculationSummary) -> tuple[str, ...]:
    """Returns which peers were missing, for how many of the rounds, and why, a phrase for each; empty if none was.

    A server that does not say which leaves one phrase that names none.
    """
    if summary.degraded and not summary.missing_peers:
        return ("a peer was still loading, or slow, for a part of it",)
    return tuple(_phrase(missing, summary.num_rounds) for missing in summary.missing_peers)


def _phrase(missing: verifier_pb2.MissingPeer, num_rounds: int) -> str:
    # A newer server may name what this version does not know.
    peer = PEERS[Peer(missing.peer)] if missing.peer in Peer._value2member_map_ else "a peer"
    is_known = missing.absence in Absence._value2member_map_
    absence = ABSENCES[Absence(missing.absence)] if is_known else "was missing"
    time = f"for {missing.num_rounds} of {num_rounds} rounds" if missing.num_rounds else "for a moment"
    return f"{peer} {absence} {time}" + (f" ({missing.reason})" if missing.reason else "")
