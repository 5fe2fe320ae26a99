"""python -m tests.fuzz: mutated messages on every RPC of real services. Exit status 1 if one does harm."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from outrider_cli.local.stack import LocalStack
from tests.fuzz.examples import rpcs
from tests.fuzz.run import HEADER, Result, fuzz
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
        LocalStack(stack_config(arguments.log_folder or Path(temporary))) as stack,
    ):
        return asyncio.run(_run(stack, arguments))


async def _run(stack: LocalStack, arguments: argparse.Namespace) -> int:
    results: list[Result] = []
    async with Servers(stack) as servers:
        known = rpcs(servers.model)
        if unknown := set(arguments.rpc) - set(known):
            print(f"error: --rpc: no {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        print(f"memory in MB: {servers.memory_mb}\n\n{HEADER}", flush=True)
        for name in arguments.rpc or known:
            result = await fuzz(
                servers,
                known[name],
                arguments.num,
                arguments.seed,
                first_call=arguments.first_call,
                on_finding=lambda finding: print(f"FINDING {finding}", flush=True),
            )
            print(result.row(), flush=True)
            results.append(result)
        num_findings = sum(len(result.findings) for result in results)
        num_messages = sum(result.num_messages for result in results)
        print(f"\nmemory in MB: {servers.memory_mb}\n{num_messages} messages, {num_findings} findings")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
