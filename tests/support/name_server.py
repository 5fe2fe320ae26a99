"""A DNS server whose answers a test sets, as a cluster answers for the name of a headless service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dnslib import QTYPE, RCODE, RR, A, DNSRecord

TTL_S = 1


class NameServer(asyncio.DatagramProtocol):
    """Answers on a loopback port, over UDP."""

    def __init__(self, addresses_of: Callable[[str], Sequence[str]]) -> None:
        """`addresses_of`: the addresses that a name has now."""
        self.port = 0
        self._addresses_of = addresses_of
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        """Returns once it answers."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.port = self._transport.get_extra_info("sockname")[1]

    def stop(self) -> None:
        """Stops answering."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        """One question."""
        question = DNSRecord.parse(data)
        reply = question.reply()
        name = str(question.q.qname).rstrip(".")
        addresses = self._addresses_of(name)
        if not addresses:
            reply.header.rcode = RCODE.NXDOMAIN
        elif question.q.qtype == QTYPE.A:
            for address in addresses:
                reply.add_answer(RR(question.q.qname, QTYPE.A, rdata=A(address), ttl=TTL_S))
        assert self._transport is not None
        self._transport.sendto(reply.pack(), sender)
