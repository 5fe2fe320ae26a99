"""A collector of traces that takes spans and forgets them: what services send to, and nothing that it costs them.

python -m outrider_bench.workers.span_collector --listen HOST:PORT
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Parses spans, as any collector does, and does nothing more."""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    """Runs until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    listen = parser.parse_args().listen
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(SpanCollector(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(listen)
    server.start()
    print(f"listening {listen.rpartition(':')[0]}:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
