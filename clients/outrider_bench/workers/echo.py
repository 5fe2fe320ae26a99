"""A server that answers each message of a stream with a fixed number of bytes: what gRPC alone costs.

    python -m outrider_bench.workers.echo --listen 127.0.0.1:0 --response-bytes 120

The same library, event loop and channel settings as the services, and nothing else: no messages, no work.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.wire.channels import CHANNEL_OPTIONS

METHOD = "/outrider.bench.Echo/Echo"


async def serve(listen: str, num_bytes: int) -> None:
    """Serves until a signal ends it."""
    answer = bytes(num_bytes)

    async def echo(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield answer

    handler: Any = grpc.stream_stream_rpc_method_handler(echo)
    service, _, method = METHOD[1:].rpartition("/")
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port(listen)
    await server.start()
    print(f"listening {listen.rpartition(':')[0]}:{port}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await server.stop(0)


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--response-bytes", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.listen, arguments.response_bytes))


if __name__ == "__main__":
    main()
