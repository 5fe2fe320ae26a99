"""An edge inside the application: a draft model in this process that dials the cloud's verifier.

>>> async with running_edge("cloud:50051", model="demo/draft") as client:       # doctest: +SKIP
...     async for chunk in client.generate("def add(a, b):\\n"):
...         print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from outrider_client.client import Client


@asynccontextmanager
async def running_edge(upstream: str, *, model: str = "demo/draft", **settings: Any) -> AsyncIterator[Client]:
    """Runs an edge in this process for as long as the block; yields a client of it.

    Usable at once: while the draft model loads, generations come without drafts. The draft model runs in another
    thread. It takes the interpreter's lock only between its forwards.

    Args:
        upstream: The cloud's verifier, HOST:PORT; or several, with commas between. Each generation goes to the one with
            least to do.
        model: The draft model; its tokenizer must be the target's.
        settings: More of `outrider.edge.settings.EdgeSettings`, as `device="cuda:0"`.

    Raises:
        ValueError: A setting is wrong.
    """
    # The one place where the client imports a service: the drafter is to run inside the application. The import is
    # local, as all other uses of the client get by without the packages that a model needs.
    from outrider.edge.service import EdgeService
    from outrider.edge.settings import EdgeSettings
    from outrider.telemetry.tracing import application_tracer, use_tracer
    from outrider.wire.channels import CHANNEL_OPTIONS

    # The edge traces as the application does: a process has one tracer.
    use_tracer(application_tracer())
    service = EdgeService(EdgeSettings(upstream=upstream, model=model, **settings))
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    service.register(server)
    with TemporaryDirectory(prefix="outrider-") as folder:
        # A socket in a private folder instead of a port: other users of the machine cannot reach it.
        address = f"unix:{Path(folder) / 'edge.sock'}"
        server.add_insecure_port(address)
        try:
            await server.start()
            await service.load()
            async with Client(address) as client:
                yield client
        finally:
            # Calls first: those that still run use the draft model and the connection to the cloud.
            await server.stop(0)
            await service.close()
