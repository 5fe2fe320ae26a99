"""Sends mutated messages to every RPC, and mutated requests to the gateway, and checks the servers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.fuzz.calls import Call, Outcome, make_call, send
from tests.fuzz.examples import Rpc
from tests.fuzz.gateway import FuzzedGateway
from tests.fuzz.http_requests import HttpCall, Path
from tests.fuzz.http_requests import make_call as make_http_call
from tests.fuzz.servers import Servers

MAX_FINDINGS = 20
"""Maximum findings per RPC."""
SHOWN_BYTES = 300
HTTP_AT_A_TIME = 12


@dataclass(slots=True)
class Result:
    """The effects of mutated messages on an RPC."""

    rpc: str
    num_messages: int = 0
    num_calls: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    memory_mb: dict[str, int] = field(default_factory=dict)

    def ended(self, code: str, seconds: float) -> None:
        """Counts a call."""
        self.num_calls += 1
        self.codes[code] += 1
        self.slowest_s = max(self.slowest_s, seconds)

    def row(self) -> str:
        """One line of the table."""
        codes = ", ".join(f"{name} {number}" for name, number in self.codes.most_common())
        return (
            f"{self.rpc:34} {self.num_messages:9} {self.num_calls:8} {self.num_messages / (self.seconds or 1):8.0f} "
            f"{self.slowest_s:8.2f}  {len(self.findings):8}  {codes}"
        )


HEADER = f"{'rpc':34} {'messages':>9} {'calls':>8} {'per s':>8} {'slowest':>8}  {'findings':>8}  statuses"


async def fuzz(
    servers: Servers,
    rpc: Rpc,
    num_messages: int,
    seed: int,
    *,
    first_call: int = 0,
    on_finding: Callable[[str], None] = lambda _: None,
) -> Result:
    """Sends at least so many messages to an RPC, then checks the servers.

    Args:
        servers: The servers that have it.
        rpc: The RPC.
        num_messages: Total of all calls; a stream's are not always all read.
        seed: Decides, with the number of a call, what is sent.
        first_call: Number of the first call.
        on_finding: Called at once for each finding.
    """
    result = Result(rpc.name)

    async def attempt(number: int) -> str | None:
        call = make_call(rpc, seed, number)
        result.num_messages += len(call.messages)
        outcome = await send(call, servers.channels[call.server], servers.addresses[call.server])
        result.ended(outcome.code.name, outcome.seconds)
        return described(call, outcome) if outcome.is_finding else None

    await _fuzz(result, attempt, rpc.num_at_a_time, num_messages, seed, first_call, servers.problems, on_finding)
    result.memory_mb = servers.memory_mb
    return result


async def fuzz_gateway(
    gateway: FuzzedGateway,
    servers: Servers,
    path: Path,
    num_requests: int,
    seed: int,
    *,
    first_call: int = 0,
    on_finding: Callable[[str], None] = lambda _: None,
) -> Result:
    """Sends so many requests to a part of the gateway's API, then checks it and the services behind it.

    Args:
        gateway: The gateway.
        servers: The services behind it.
        path: The part of its API.
        num_requests: Number of connections, each with one or a few requests.
        seed: Decides, with the number of a call, what is sent.
        first_call: Number of the first call.
        on_finding: Called at once for each finding.
    """
    result = Result(path.rpc)

    async def attempt(number: int) -> str | None:
        call = make_http_call(path, seed, number)
        result.num_messages += 1
        word, seconds, problem = await gateway.send(call)
        result.ended(word, seconds)
        return described_http(call, problem, seconds) if problem else None

    async def problems() -> list[str]:
        return [*await gateway.problems(), *await servers.problems()]

    await _fuzz(result, attempt, HTTP_AT_A_TIME, num_requests, seed, first_call, problems, on_finding)
    result.memory_mb = {"gateway": gateway.memory_mb, **servers.memory_mb}
    return result


async def _fuzz(
    result: Result,
    attempt: Callable[[int], Awaitable[str | None]],
    num_at_a_time: int,
    num_messages: int,
    seed: int,
    first_call: int,
    problems: Callable[[], Awaitable[list[str]]],
    on_finding: Callable[[str], None],
) -> None:
    began = time.monotonic()
    numbers = iter(range(first_call, 2**63))

    def find(finding: str) -> None:
        result.findings.append(finding)
        on_finding(finding)

    async def work() -> None:
        while result.num_messages < num_messages and len(result.findings) < MAX_FINDINGS:
            if finding := await attempt(next(numbers)):
                find(finding)

    await asyncio.gather(*(work() for _ in range(num_at_a_time)))
    result.seconds = time.monotonic() - began
    for problem in await problems():
        find(f"after {result.rpc}, seed {seed}, up to call {next(numbers) - 1}: {problem}")


def described(call: Call, outcome: Outcome) -> str:
    """A finding, with what is needed to reproduce it."""
    sent = "\n".join(f"    {message[:SHOWN_BYTES].hex()}" for message in call.messages)
    return (
        f"{call.rpc.name}: {outcome.code.name} {outcome.details[:500]!r} after {outcome.seconds:.2f} s\n"
        f"  again: python -m tests.fuzz --rpc {call.rpc.name} --seed {call.seed} --first-call {call.number} --num 1\n"
        f"  sent, in hex (at most {SHOWN_BYTES} bytes of each):\n{sent}"
    )


def described_http(call: HttpCall, problem: str, seconds: float) -> str:
    """A finding at the gateway, with what is needed to reproduce it."""
    sent = b"".join(call.pieces)
    return (
        f"{call.path.rpc}: {problem} after {seconds:.2f} s\n"
        f"  again: python -m tests.fuzz --rpc {call.path.rpc} --seed {call.seed} --first-call {call.number} --num 1\n"
        f"  sent {len(sent)} bytes, then {call.end}: {sent[: 3 * SHOWN_BYTES]!r}"
    )
