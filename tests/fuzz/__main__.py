"""python -m tests.fuzz sends mutated messages to every RPC of real services, and mutated requests to a gateway in front
of them. Exit status 1 if one does harm."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from outrider_cli.local.stack import LocalStack
from tests.fuzz.examples import rpcs
from tests.fuzz.gateway import FuzzedGateway, running_gateway
from tests.fuzz.http_requests import paths
from tests.fuzz.run import HEADER, Result, fuzz, fuzz_gateway
from tests.fuzz.servers import Servers, stack_config


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="messages for each RPC (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, help="decides what is sent (default: 0)")
    parser.add_argument("--rpc", action="append", default=[], help="only this RPC, like verifier/Generate; repeatable")
    parser.add_argument("--first-call", type=int, default=0, help="number of the first call (default: 0)")
    parser.add_argument("--log-folder", type=Path, help="where the servers' logs go (default: a temporary folder)")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="outrider-fuzz-") as temporary,
        LocalStack(stack_config(folder := arguments.log_folder or Path(temporary))) as stack,
        running_gateway(stack, folder) as gateway,
    ):
        return asyncio.run(_run(stack, gateway, arguments))


async def _run(stack: LocalStack, gateway: FuzzedGateway, arguments: argparse.Namespace) -> int:
    results: list[Result] = []
    async with Servers(stack) as servers:
        known, over_http = rpcs(servers.model), paths()
        if unknown := set(arguments.rpc) - set(known) - set(over_http):
            names = ", ".join((*known, *over_http))
            print(f"error: --rpc: no {', '.join(sorted(unknown))}; there are {names}", file=sys.stderr)
            return 2
        print(f"memory in MB: {servers.memory_mb}, gateway {gateway.memory_mb}\n\n{HEADER}", flush=True)
        for name in arguments.rpc or (*known, *over_http):
            num, seed, first_call = arguments.num, arguments.seed, arguments.first_call
            if name in known:
                result = await fuzz(servers, known[name], num, seed, first_call=first_call, on_finding=_told)
            else:
                path = over_http[name]
                result = await fuzz_gateway(gateway, servers, path, num, seed, first_call=first_call, on_finding=_told)
            print(result.row(), flush=True)
            results.append(result)
        num_findings = sum(len(result.findings) for result in results)
        num_messages = sum(result.num_messages for result in results)
        memory = f"{servers.memory_mb}, gateway {gateway.memory_mb}"
        print(f"\nmemory in MB: {memory}\n{num_messages} messages, {num_findings} findings")
    return 1 if num_findings else 0


def _told(finding: str) -> None:
    print(f"FINDING {finding}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
