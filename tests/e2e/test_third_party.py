"""Clients that share no code with ours: buf (Go) by reflection, grpc-js (Node) by the protos."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from outrider_cli.local.stack import LocalStack
from outrider_client.client import Client

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n"
PROTOS = Path(__file__).parents[2] / "protos"
HEALTH_PROTO = """\
syntax = "proto3";
package grpc.health.v1;
message HealthCheckRequest { string service = 1; }
message HealthCheckResponse {
  enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; }
  ServingStatus status = 1;
}
service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); }
"""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def expected_token_ids(stack: LocalStack) -> tuple[int, ...]:
    async with Client(stack.address) as client:
        result = await client.complete(PROMPT, temperature=0, max_tokens=16, ignore_eos=True, method="off")
    return result.token_ids


@pytest.fixture
def buf() -> str:
    found = os.environ.get("OUTRIDER_BUF") or shutil.which("buf")
    if found is None:
        pytest.skip("buf is not installed (npm install @bufbuild/buf)")
    return found


def buf_curl(buf: str, stack: LocalStack, method: str, data: object) -> list[dict[str, object]]:
    url = f"http://{stack.address}/{method}"
    output = run(buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(data), url)
    decoder, objects, position = json.JSONDecoder(), [], 0
    while position < len(output.rstrip()):
        value, position = decoder.raw_decode(output, position)
        objects.append(value)
        position += len(output[position:]) - len(output[position:].lstrip())
    return objects


async def test_buf_generates_by_reflection(buf: str, stack: LocalStack) -> None:
    request = {
        "prompt": {"text": PROMPT},
        "sampling": {"temperature": 0, "maxTokens": 16, "ignoreEos": True},
        "speculation": {"method": "METHOD_PEARL"},
    }
    responses = buf_curl(buf, stack, "outrider.v1.VerifierService/Generate", request)
    token_ids = [t for r in responses for t in r.get("chunk", {}).get("tokenIds", [])]  # type: ignore[attr-defined]
    assert tuple(token_ids) == await expected_token_ids(stack)
    assert responses[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"  # type: ignore[index]


async def test_buf_finds_every_service_healthy(buf: str, stack: LocalStack) -> None:
    for name in ("", "outrider.v1.VerifierService"):
        (response,) = buf_curl(buf, stack, "grpc.health.v1.Health/Check", {"service": name})
        assert response == {"status": "SERVING"}


async def test_grpc_js_generates_from_the_protos(stack: LocalStack, tmp_path: Path) -> None:
    if shutil.which("node") is None or not _resolves("@grpc/grpc-js") or not _resolves("@grpc/proto-loader"):
        pytest.skip("node with @grpc/grpc-js and @grpc/proto-loader (in NODE_PATH) is not installed")
    protos = tmp_path / "protos"
    shutil.copytree(PROTOS, protos)
    (protos / "grpc_health.proto").write_text(HEALTH_PROTO)
    script = Path(__file__).with_name("grpc_js_client.js")
    answer = json.loads(run("node", str(script), stack.address, str(protos), PROMPT))
    assert answer["health"] == "SERVING"
    assert tuple(answer["tokenIds"]) == await expected_token_ids(stack)
    assert answer["reason"] == "FINISH_REASON_LENGTH"


def _resolves(module: str) -> bool:
    command = ["node", "-e", f"require.resolve({module!r})"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
