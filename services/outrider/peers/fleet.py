"""Several speculators for one verifier: each session drafts with the least loaded one.

A session stays where it is while that speculator is well. It leaves at once when its stream is lost, and it is moved
when its speculator has much more to do than another one. To the listener a move is a stream that begins again: the
tree that the drafts have grown stays.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import grpc
import structlog

from outrider.core.speculation import Steering
from outrider.core.statistics import Absence, Traffic
from outrider.core.tree import Draft, TokenId
from outrider.peers.channel import PeerState, addresses_behind
from outrider.peers.reconnecting import reason_of
from outrider.peers.speculator import (
    GARBAGE_RETRY_S,
    MAX_NODES_PER_S,
    REFUSED_RETRY_S,
    SpeculationListener,
    SpeculationSpec,
    SpeculationStream,
    SpeculatorPeer,
)
from outrider.security.peer_channel import PeerSecurity
from outrider.telemetry.metrics import Metrics, counter, gauges
from outrider.telemetry.tasks import keep_running
from outrider.v1 import speculator_pb2, speculator_pb2_grpc, verifier_pb2
from outrider.wire.channels import NOT_TAKEN, doubled
from outrider.wire.handshake import Model

log = structlog.get_logger(__name__)

TEND_S = 1.0
"""Mean time between two checks of the loads, randomized so that verifiers do not all move a session at once."""
LOOKS_PER_LOOK_UP = 5
"""Checks of the loads between two checks of the names."""
POLL_TIMEOUT_S = 2.0
MIN_GAP = 3
"""A session is moved to a speculator with at least this many fewer sessions: after the move it still has fewer, so none
moves back."""
MAX_MOVE_S = 10.0
"""A move that has brought no draft after this time is given up."""


class SpeculatorFleet:
    """Holds the speculators that a verifier dials, and the sessions that draft with them. Lives on the event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        model: Model,
        security: PeerSecurity | None = None,
        max_nodes_per_s: float = MAX_NODES_PER_S,
    ) -> None:
        """Makes the channels; nothing is dialled before `start`, or the first session.

        Args:
            addresses: At least one, each once. See `PeerState`; of a name, see `look_up`.
            model: The target, which their models must match.
            security: See `PeerState`.
            max_nodes_per_s: Limit of one session's drafts; nodes beyond it are dropped.
        """
        self._make_peer = partial(SpeculatorPeer, model=model, security=security, max_nodes_per_s=max_nodes_per_s)
        self._by_target = {address: [self._peer(address)] for address in addresses}
        self._retired: list[SpeculatorPeer] = []
        """Speculators that no name stands for any more, and that may still have sessions."""
        self.peers: tuple[SpeculatorPeer, ...] = ()
        """All speculators that sessions may go to."""
        self._set_peers()
        self.num_moves = 0
        """Sessions that were moved from a speculator that was well."""
        self._sessions: set[FleetSession] = set()
        self._task: asyncio.Task[None] | None = None

    def speculate(
        self, spec: SpeculationSpec, committed: Sequence[TokenId], listener: SpeculationListener
    ) -> FleetSession:
        """Starts a session; it lives until it is closed. The parameters are those of `SpeculatorPeer.speculate`."""
        session = FleetSession(self, spec, committed, listener)
        self._sessions.add(session)
        return session

    @property
    def states(self) -> list[PeerState]:
        """The speculators as peers."""
        return [peer.state for peer in self.peers]

    def infos(self) -> list[verifier_pb2.PeerInfo]:
        """Describes each speculator for a caller of the verifier."""
        return [peer.info() for peer in self.peers]

    def start(self) -> None:
        """Begins to check names and loads, until `close`."""
        self._task = keep_running("speculators", self._tend)

    async def look_up(self) -> None:
        """Finds what the names among the addresses stand for now: each address of a name is a speculator."""
        for target, peers in self._by_target.items():
            found = await addresses_behind(target)
            known = {peer.state.address: peer for peer in peers}
            # A name of one address is dialled as it is: then gRPC follows it. One that is not found may come back.
            if not found or (len(found) == 1 and target in known):
                continue
            host = target.removeprefix("dns:///").rpartition(":")[0]
            peers[:] = [known.pop(address) if address in known else self._peer(address, host) for address in found]
            self._retired += known.values()
        self._set_peers()

    def _peer(self, address: str, host: str = "") -> SpeculatorPeer:
        return self._make_peer(address, host=host, on_back=self._on_back)

    def _set_peers(self) -> None:
        self.peers = tuple(peer for peers in self._by_target.values() for peer in peers)
        for peer in (*self.peers, *self._retired):
            peer.has_stand_ins = len(self.peers) > 1

    def forget(self, session: FleetSession) -> None:
        """Takes in that a session is over."""
        self._sessions.discard(session)

    def choose(self, session_id: str, lost: SpeculatorPeer | None = None) -> SpeculatorPeer | None:
        """Returns the least loaded of the speculators that are well and have room; None if there is none.

        Args:
            session_id: Decides among equals, so that verifiers with the same list do not all prefer its first.
            lost: The speculator that has lost the session. It is not chosen. None means that there is none.
        """
        able = [peer for peer in self.peers if peer.has_room and peer is not lost]
        return self._least(able, session_id) if able else None

    def first_choice(self, session_id: str) -> SpeculatorPeer:
        """Returns the speculator for a session that begins: if none is well or has room, the one to wait for."""
        return self.choose(session_id) or self._least(
            [peer for peer in self.peers if peer.breaker.is_closed] or self.peers, session_id
        )

    def _least(self, peers: Sequence[SpeculatorPeer], session_id: str) -> SpeculatorPeer:
        def merit(peer: SpeculatorPeer) -> tuple[float, int]:
            return peer.load.share_with(1), zlib.crc32(f"{session_id} {peer.state.address}".encode())

        return min(peers, key=merit)

    def balance(self) -> None:
        """Moves a session from the most loaded speculator to the least loaded one, if that has much less to do.
        Sessions of a speculator that no name stands for any more are moved first.

        One at a time: this verifier and others learn the new loads of both only by the move.
        """
        num_moving = sum(session.tend() for session in list(self._sessions))
        if num_moving:
            return
        able = [peer for peer in self.peers if peer.has_room]
        if not able:
            return
        target = min(able, key=lambda peer: peer.load.share_with())
        movable = [each for each in self._sessions if each.may_move_to(target)]
        leaving = [each for each in movable if each.peer not in self.peers]
        if not leaving:
            origin = max({each.peer for each in movable}, key=lambda peer: peer.load.share_with(), default=None)
            if origin is not None and _is_worth_a_move(origin, target):
                leaving = [each for each in movable if each.peer is origin]
        if leaving:
            # The shortest text, which the other one has read soonest.
            min(leaving, key=lambda session: session.num_committed_tokens).move_to(target)

    async def refresh(self) -> None:
        """Asks those speculators for their load that would tell it to none of our sessions."""
        await asyncio.gather(
            *(self._poll(peer) for peer in self.peers if peer.breaker.is_closed and not peer.load.num_own_sessions)
        )

    async def _poll(self, peer: SpeculatorPeer) -> None:
        stub = peer.state.stub(speculator_pb2_grpc.SpeculatorServiceStub)
        try:
            info = await stub.GetInfo(speculator_pb2.SpeculatorServiceGetInfoRequest(), timeout=POLL_TIMEOUT_S)
        except grpc.aio.UsageError:
            return  # the channel was closed
        except grpc.aio.AioRpcError as error:
            # Any other status tells nothing of its sessions' streams.
            if error.code() in NOT_TAKEN | {grpc.StatusCode.DEADLINE_EXCEEDED}:
                peer.breaker.trip(reason_of(error))
            return
        # None is what grpc.aio returns for bytes that it cannot parse.
        if info is not None:
            peer.state.up()
            peer.load.report(info.num_sessions, info.max_num_sessions, info.busy_percent / 100)

    async def _tend(self) -> None:
        while True:
            await self.look_up()
            if len(self.peers) > 1:
                await self.refresh()  # even without sessions: the loads are known at the first burst
            for _ in range(LOOKS_PER_LOOK_UP):
                await asyncio.sleep(random.uniform(0.8, 1.2) * TEND_S)
                if self._sessions and len(self.peers) > 1:
                    await self.refresh()
                    self.balance()
            idle = [peer for peer in self._retired if not peer.load.num_own_sessions]
            self._retired = [peer for peer in self._retired if peer not in idle]
            for peer in idle:
                await peer.close()

    def _on_back(self) -> None:
        for session in list(self._sessions):
            session.tend()

    def metrics(self) -> Metrics:
        """Yields what is known of each speculator, by its address. Safe to call in any thread."""
        yield from read_speculators(
            {
                peer.state.address: SpeculatorState(
                    peer.state.is_connected, peer.load.num_own_sessions, peer.load.num_sessions, peer.load.busy
                )
                for peer in self.peers
            }
        )
        yield counter(
            "outrider_speculator_moves_total",
            "Sessions that were moved from a speculator that was well to one with less to do.",
            self.num_moves,
        )

    async def close(self) -> None:
        """Closes the channels and every stream on them."""
        if self._task is not None:
            self._task.cancel()
        await asyncio.gather(*(peer.close() for peer in (*self.peers, *self._retired)))


class SpeculatorState(NamedTuple):
    """Holds what is known of a speculator, remote or in the verifier's process."""

    is_up: bool
    num_own_sessions: int
    num_sessions: int
    busy: float
    """Share of the time that its engine is busy, 0 to 1."""


def read_speculators(states: Mapping[str, SpeculatorState]) -> Metrics:
    """Yields what is known of each speculator, by its address. Safe to call in any thread."""
    label = "address"
    yield gauges(
        "outrider_speculator_up",
        "Whether the speculator answered when it was last needed.",
        label,
        {address: state.is_up for address, state in states.items()},
    )
    yield gauges(
        "outrider_speculator_own_sessions",
        "Sessions of this verifier at the speculator, now.",
        label,
        {address: state.num_own_sessions for address, state in states.items()},
    )
    yield gauges(
        "outrider_speculator_sessions",
        "Sessions of all verifiers at the speculator: as it last said, and what changed here since.",
        label,
        {address: state.num_sessions for address, state in states.items()},
    )
    yield gauges(
        "outrider_speculator_busy_ratio",
        "Share of the time that the speculator's engine is busy, as it last said.",
        label,
        {address: state.busy for address, state in states.items()},
    )


def _is_worth_a_move(origin: SpeculatorPeer, target: SpeculatorPeer) -> bool:
    """Returns True if a session should go from one to the other. The reverse is never true after it went."""
    if not target.load.num_sessions:
        return origin.load.num_sessions > 1 and target.load.share_with(1) < origin.load.share_with()
    return target.load.share_with(MIN_GAP) <= origin.load.share_with()


class _Leg:
    """One stream of a session; tags its callbacks."""

    def __init__(self, session: FleetSession, peer: SpeculatorPeer) -> None:
        self.peer = peer
        self.forward_us: int | None = None
        """Time of a draft forward there, in microseconds. None means that the stream was never open."""
        self._session = session
        self.stream = session.opened_at(peer, self)

    def on_attached(self, forward_us: int) -> None:
        """See `SpeculationListener`."""
        self.forward_us = forward_us
        self._session.on_open(self, forward_us)

    def on_draft(self, draft: Draft) -> None:
        """See `SpeculationListener`."""
        self._session.on_draft(self, draft)

    def on_detached(self, absence: Absence) -> None:
        """See `SpeculationListener`."""
        self._session.on_lost(self, absence)


class FleetSession:
    """Drafts for one session with one speculator of a fleet after the other. Lives on the event loop."""

    def __init__(
        self,
        fleet: SpeculatorFleet,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
    ) -> None:
        """See `SpeculatorFleet.speculate`."""
        self.traffic = Traffic()
        """Bytes of all streams of this session so far."""
        self._fleet, self._spec, self._committed, self._listener = fleet, spec, committed, listener
        # Streams that are opened later belong to the session's trace, too.
        self._context = contextvars.copy_context()
        self._clock = asyncio.get_running_loop().time
        self._steering = Steering()
        self._is_attached = True
        """True until the listener is told otherwise."""
        self._num_losses = 0
        """Streams that were lost or refused since the last draft."""
        self._seek_at = 0.0
        """Time from which on it may look for another speculator."""
        self._left: set[SpeculatorPeer] = set()
        """Speculators that it was moved away from: it is not moved back."""
        self._is_closed = False
        self._move: _Leg | None = None
        """The stream that takes over when it brings its first draft."""
        self._move_until = 0.0
        self._leg = _Leg(self, fleet.first_choice(spec.session_id))

    @property
    def peer(self) -> SpeculatorPeer:
        """The speculator that it drafts with."""
        return self._leg.peer

    @property
    def num_committed_tokens(self) -> int:
        """Length of the text."""
        return len(self._committed)

    # From the generation.

    def send_commit(self) -> None:
        """Sends the tokens that were added to the committed ones."""
        for leg in self._legs():
            leg.stream.send_commit()

    def send_steering(self, steering: Steering) -> None:
        """Sends measurements and decisions. Fields that are not set keep their last value."""
        self._steering = self._steering.then(steering)
        if self._steering.is_pause:
            self._give_up_move()  # no draft would end it
        for leg in self._legs():
            leg.stream.send_steering(steering)

    def close(self) -> None:
        """Ends the session on every speculator."""
        self._is_closed = True
        self._fleet.forget(self)
        for leg in self._legs():
            leg.stream.close()

    # From the fleet.

    def opened_at(self, peer: SpeculatorPeer, listener: SpeculationListener) -> SpeculationStream:
        """Opens a stream at a speculator, which is told what was committed and steered so far."""
        stream = self._context.run(peer.speculate, self._spec, self._committed, listener, self.traffic)
        if self._steering != Steering():
            stream.send_steering(self._steering)
        return stream

    def tend(self) -> bool:
        """Looks for another speculator if the stream is lost, and gives up a move that takes too long. Returns True
        while the session is being moved."""
        if self._move is not None and self._clock() >= self._move_until:
            self._give_up_move()
        if self._leg.stream.is_lost and self._move is None and (peer := self._other_peer()) is not None:
            self._go_on(_Leg(self, peer))
        return self._move is not None

    def may_move_to(self, peer: SpeculatorPeer) -> bool:
        """Returns True if a move there would be useful: the session drafts, and has not left it before."""
        is_drafting = self._leg.forward_us is not None and not self._leg.stream.is_lost and not self._steering.is_pause
        return is_drafting and peer is not self._leg.peer and peer not in self._left

    def move_to(self, peer: SpeculatorPeer) -> None:
        """Opens a stream at another speculator; it takes over when it has read the text."""
        self._move_until = self._clock() + MAX_MOVE_S
        self._move = _Leg(self, peer)

    # From the streams.

    def on_open(self, leg: _Leg, forward_us: int) -> None:
        """Takes in that a stream is open."""
        if leg is self._leg:
            self._attach(forward_us)
        elif leg is self._move and 0 < self._spec.max_forward_us < forward_us:
            self._give_up_move()  # it begins with a pause: such a slow speculator brings less than the current one

    def on_draft(self, leg: _Leg, draft: Draft) -> None:
        """Takes in new nodes. The first ones of a move end it."""
        if leg is self._move:
            log.info("speculator.moved", session_id=self._spec.session_id, address=leg.peer.state.address)
            self._fleet.num_moves += 1
            self._left.add(self._leg.peer)
            self._move = None
            self._go_on(leg)
        if leg is self._leg:
            self._num_losses = 0
            self._listener.on_draft(draft)

    def on_lost(self, leg: _Leg, absence: Absence) -> None:
        """Takes in that a stream was lost, and why: goes on at another speculator, or waits for this one."""
        if leg is self._move:
            self._give_up_move()
        if leg is not self._leg or self._is_closed:
            return
        self._num_losses += 1
        self._left.clear()  # it is not moved back and forth, but after a loss it may go anywhere
        # All of them may refuse this session: there is then no hurry.
        if (num_vain := self._num_losses - len(self._fleet.peers)) > 0:
            self._seek_at = self._clock() + doubled(GARBAGE_RETRY_S, REFUSED_RETRY_S, num_vain - 1)
        other, self._move = self._move, None
        if other is None and (peer := self._other_peer()) is not None:
            other = _Leg(self, peer)
        # If a speculator refuses the session and another takes it, the session has lost nothing.
        if self._is_attached and (leg.forward_us is not None or other is None):
            self._is_attached = False
            self._listener.on_detached(absence)
        if other is not None:
            self._go_on(other)

    def _attach(self, forward_us: int) -> None:
        self._is_attached = True
        self._listener.on_attached(forward_us)

    def _go_on(self, leg: _Leg) -> None:
        """Drafts with another stream from now on, and closes the previous one."""
        before, self._leg = self._leg, leg
        before.stream.close()
        if leg.forward_us is not None:
            self._attach(leg.forward_us)

    def _give_up_move(self) -> None:
        if (leg := self._move) is not None:
            self._move = None
            self._left.add(leg.peer)
            leg.stream.close()

    def _legs(self) -> list[_Leg]:
        return [self._leg] if self._move is None else [self._leg, self._move]

    def _other_peer(self) -> SpeculatorPeer | None:
        """Returns the speculator to go on with instead of this one; None if there is none, or not yet."""
        if self._clock() < self._seek_at:
            return None
        return self._fleet.choose(self._spec.session_id, self._leg.peer)
