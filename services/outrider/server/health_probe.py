"""Asks a service for its health: ``python -m outrider.server.health_probe HOST:PORT [NAME]``.

For probes in places without another program for it. NAME is the gRPC service's, like ``outrider.v1.VerifierService``;
without it the server as a whole is asked. Plaintext, as ``--health-listen`` is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING, NOT_SERVING, UNREACHABLE = 0, 1, 3
"""Exit statuses; 2 is for wrong flags."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the status of a service. Exits with 0 if it is SERVING, with 1 if it is not, with 3 without an answer."""
    program = "python -m outrider.server.health_probe"
    parser = argparse.ArgumentParser(prog=program, description="Ask a service for its health.")
    parser.add_argument("address", metavar="HOST:PORT", help="where --health-listen is")
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="gRPC service (default: the whole server)")
    parser.add_argument(
        "--timeout-s", type=float, default=2.0, metavar="S", help="longest wait for the answer (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    sys.exit(ask(options.address, options.name, options.timeout_s))


def ask(address: str, name: str, timeout_s: float) -> int:
    """Checks a service's health. Returns the exit status."""
    request = health_pb2.HealthCheckRequest(service=name)
    # gRPC obeys http_proxy even for an address on this machine, as a probe's is.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            print(f"error: {address}: {error.code().name}: {error.details()}", file=sys.stderr)
            # NOT_FOUND is an answer: the server is there, and has no service of that name.
            return NOT_SERVING if error.code() is grpc.StatusCode.NOT_FOUND else UNREACHABLE
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return SERVING if response.status == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING


if __name__ == "__main__":
    main()
