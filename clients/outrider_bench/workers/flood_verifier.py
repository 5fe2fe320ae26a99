"""A verifier that says the same word as fast as it can: what is measured behind it waits for nothing else.

python -m outrider_bench.workers.flood_verifier --listen HOST:PORT
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc

MODEL = types_pb2.ModelInfo(model_id="flood", dtype="none", max_context_len=1 << 30)
CHUNK = verifier_pb2.GenerateResponse(
    chunk=verifier_pb2.Chunk(token_ids=[5], sources=[types_pb2.SOURCE_TARGET], text=" word")
)


class FloodVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Sends as many chunks as tokens are asked for."""

    def Generate(
        self, request: verifier_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[verifier_pb2.GenerateResponse]:
        """Generates as many tokens as are asked for, one a chunk."""
        count = request.sampling.max_tokens
        started = verifier_pb2.Started(session_id="flood", seed=1, num_prompt_tokens=1, model=MODEL)
        yield verifier_pb2.GenerateResponse(started=started)
        for _ in range(count):
            yield CHUNK
        summary = verifier_pb2.SpeculationSummary(method=types_pb2.METHOD_OFF, num_rounds=count)
        yield verifier_pb2.GenerateResponse(
            finished=verifier_pb2.Finished(
                reason=verifier_pb2.FINISH_REASON_LENGTH, num_prompt_tokens=1, num_output_tokens=count, summary=summary
            )
        )

    def GetInfo(
        self, request: verifier_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.GetInfoResponse:
        """Names the model."""
        return verifier_pb2.GetInfoResponse(model=MODEL, methods=[types_pb2.METHOD_OFF])


def main() -> None:
    """Runs until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    listen = parser.parse_args().listen
    server = grpc.server(ThreadPoolExecutor(2))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(
        FloodVerifier(),  # type: ignore[abstract]  # other calls are unimplemented
        server,
    )
    healthy = health.HealthServicer()
    healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port(listen)
    server.start()
    print(f"listening {listen.rpartition(':')[0]}:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
