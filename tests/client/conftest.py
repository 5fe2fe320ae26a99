"""A fake verifier, listening."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import verifier_pb2_grpc

from .fakes import FakeVerifier


@pytest.fixture
def verifier() -> Iterator[FakeVerifier]:
    """A fake verifier that listens on loopback and is healthy."""
    fake = FakeVerifier()
    fake.health.set("", health_pb2.HealthCheckResponse.SERVING)
    with futures.ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        server.stop(None).wait()
