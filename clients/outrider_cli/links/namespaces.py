"""Makes, enters and deletes network namespaces. Works on Linux only, and as root only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")
DEVICE = "wan0"
CLOUD_ADDRESS, EDGE_ADDRESS, PREFIX_LEN = "10.77.0.1", "10.77.0.2", 24
_NAMED = Path("/run/netns")
# The first number is the process that made it, the second tells its namespaces apart.
_OURS = re.compile(r"outrider-(\d+)-\d+-(cloud|edge)")
# Of <linux/sched.h> and <linux/if_tun.h>. Python has `os.setns` from 3.12 on only. IFF_NO_PI: packets come without the
# four bytes that a TUN device otherwise puts before them.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_QUEUE_LEN = 5000
"""Packets that the device holds until we read them. It is long, so that only the link's own queue loses packets."""


class WanNotPossible(Exception):
    """This machine, or this user, cannot make a network. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Holds the name and address of a network namespace with one end of a link in it."""

    name: str
    """The name for `ip netns exec`."""
    address: str
    """The address of its end of the link, which the other side dials. Inside it, loopback works too."""


def why_no_wan() -> str:
    """Names the missing condition for namespaces with a link between them; an empty text means that one can try."""
    if sys.platform != "linux":
        return "a WAN link needs Linux"
    if os.geteuid() != 0:
        return "a WAN link needs root: it makes network namespaces and TUN devices"
    if not TUN.exists():
        return f"a WAN link needs {TUN}"
    return "" if shutil.which("ip") else "a WAN link needs the program ip (iproute2)"


def in_namespace(name: str, command: list[str]) -> list[str]:
    """Returns the command line that runs a command in a namespace; the command gets the process id of `ip`."""
    return ["ip", "netns", "exec", name, *command] if name else command


@contextmanager
def two_namespaces(names: tuple[str, str]) -> Iterator[tuple[Namespace, Namespace]]:
    """Makes namespaces of these names, each with loopback, for the block. Raises WanNotPossible.

    Namespaces of killed processes are deleted first.
    """
    _delete_stale()
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        yield Namespace(names[0], CLOUD_ADDRESS), Namespace(names[1], EDGE_ADDRESS)
    finally:
        for name in made:
            delete(name)


def delete(name: str) -> None:
    """Deletes a namespace, and every device in it, unless processes still live there. One that is gone is no error."""
    if (_NAMED / name).exists():
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def open_tun(namespace: Namespace) -> int:
    """Makes a TUN device in the namespace, up, with its address; returns its file descriptor, which does not block.

    Reads and writes of the descriptor are packets. Closing it deletes the device. Raises WanNotPossible.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(_NAMED / namespace.name, os.O_RDONLY)
    try:
        # A device belongs to the namespace of the thread that opens it.
        if libc.setns(other, _CLONE_NEWNET):
            raise WanNotPossible(f"cannot enter the namespace {namespace.name}: {os.strerror(ctypes.get_errno())}")
        try:
            device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            # The beginning of C's `struct ifreq`: the name, 16 bytes, and the flags.
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            raise WanNotPossible(f"cannot make a TUN device: {error.strerror}") from error
        finally:
            # Also after a failure: whatever this thread opens or starts next would be in the wrong network.
            libc.setns(own, _CLONE_NEWNET)
    finally:
        os.close(own)
        os.close(other)
    _ip("-n", namespace.name, "addr", "add", f"{namespace.address}/{PREFIX_LEN}", "dev", DEVICE)
    _ip("-n", namespace.name, "link", "set", DEVICE, "up", "txqueuelen", str(_QUEUE_LEN))
    return device


def _delete_stale() -> None:
    for path in _NAMED.glob("*") if _NAMED.exists() else ():
        # If another process has that number by now, the namespace stays until that process has ended.
        if (match := _OURS.fullmatch(path.name)) and not Path(f"/proc/{match[1]}").exists():
            delete(path.name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise WanNotPossible(f"ip {' '.join(words)}: {done.stderr.strip()}")
