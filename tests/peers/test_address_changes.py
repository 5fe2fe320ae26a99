"""A name whose address changes, as after a Pod was moved, is dialled at the new one; a name with several is a fleet."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.peers.fleet import SpeculatorFleet
from outrider.peers.speculator import SpeculatorPeer
from outrider.security.peer_channel import PeerSecurity
from outrider_client.channel import open_aio
from tests.support.scripted_speculator import SPEC, AModel, Listener, ScriptedSpeculator, serving, speculate
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
NAME, BEFORE, AFTER = "speculator.test", "127.0.0.2", "127.0.0.3"
RECOVERY_S = 3.0
"""Names are resolved again after a second."""
OWN_HOSTS = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh"]
"""A command that sees our file in place of /etc/hosts."""


def point(hosts: Path, *addresses: str) -> None:
    """Gives the name these addresses from now on."""
    hosts.write_text("".join(f"{address} {NAME}\n" for address in addresses))


async def moved(hosts: Path) -> None:
    """A session and an application's channel dial a name, whose address then changes. Needs `hosts` as /etc/hosts."""
    servicer, listener = ScriptedSpeculator(), Listener()
    point(hosts, BEFORE)
    async with serving(servicer, f"{BEFORE}:0") as bound:
        port = bound.rpartition(":")[2]
        peer = SpeculatorPeer(f"{NAME}:{port}", AModel(), PeerSecurity(insecure=True))
        stream = speculate(peer, listener)
        channel = open_aio(f"{NAME}:{port}", None)
        stub = health_pb2_grpc.HealthStub(channel)
        await until(lambda: listener.num_drafts)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=5)
    point(hosts, AFTER)
    num_drafts, began = listener.num_drafts, time.monotonic()
    async with serving(servicer, f"{AFTER}:{port}"):
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=RECOVERY_S)
        await until(lambda: listener.num_drafts > num_drafts)
        assert time.monotonic() - began < RECOVERY_S
        stream.close()
        await channel.close()
        await peer.close()


async def scaled(hosts: Path) -> None:
    """Sessions of a fleet dial a name that has one address, then two, then only the second one. Needs `hosts` as
    /etc/hosts."""
    first, second, listeners = ScriptedSpeculator(), ScriptedSpeculator(), [Listener() for _ in range(7)]
    async with serving(first, f"{BEFORE}:0") as bound:
        port = bound.rpartition(":")[2]
        async with serving(second, f"{AFTER}:{port}"):
            fleet = SpeculatorFleet([f"dns:///{NAME}:{port}"], AModel(), PeerSecurity(insecure=True))
            for addresses, expected in (([BEFORE], (1, 0)), ([BEFORE, AFTER], (2, 2)), ([AFTER], (2, 5))):
                point(hosts, *addresses)
                await fleet.look_up()
                # The fleet does not count the session that was opened at the name as one at the first address.
                await fleet.refresh()
                while sum(expected) > first.num_streams + second.num_streams:
                    listener = listeners.pop()
                    fleet.speculate(SPEC, [1, 2], listener)
                    await until(lambda listener=listener: listener.num_drafts)
                assert (first.num_streams, second.num_streams) == expected
            await fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["moved", "scaled"])
def test_whoever_dials_a_name_finds_its_new_addresses(tmp_path: Path, scenario: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.touch()
    if shutil.which("unshare") is None or subprocess.run([*OWN_HOSTS, hosts, "true"], capture_output=True).returncode:
        pytest.skip("needs root, for a mount of its own")
    command = [*OWN_HOSTS, hosts, sys.executable, "-m", "tests.peers.test_address_changes", scenario, hosts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    asyncio.run({"moved": moved, "scaled": scaled}[sys.argv[1]](Path(sys.argv[2])))
