"""A gateway as a process, under every known flood in turn: it stays within its memory, and a stream next to the floods
continues."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import yaml

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from tests.support.fake_verifier import FakeVerifier, a_good_generation, chunk, started
from tests.support.processes import gateway_process
from tests.support.raw_http import RawAnswer, exchanged, post
from tests.support.waiting import until

pytestmark = pytest.mark.suite

MANIFEST = Path(__file__).parents[2] / "deploy" / "base" / "gateway" / "deployment.yaml"
LONGEST_GAP_S = 0.5
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHUNKED = post(COMPLETIONS, "transfer-encoding: chunked")
GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
SIZE = 4 << 20
PIECE = b"a" * 65_536


def filled(begin: bytes, part: bytes, end: bytes, size: int = SIZE) -> bytes:
    """A body of about this size, the largest that is accepted."""
    return begin + part * ((size - len(begin) - len(end)) // len(part)) + end


BODIES = {
    "empty lists": (COMPLETIONS, filled(b'{"prompt":[', b"[],", b"1]}")),
    "empty objects": (COMPLETIONS, filled(b'{"prompt":[', b"{},", b"1]}")),
    "nested lists": (COMPLETIONS, filled(b'{"prompt":[', b"[" * 90 + b"]" * 90 + b",", b"1]}", 190_000)),
    "deep": (COMPLETIONS, filled(b'{"prompt":', b"[", b"}")),
    "digits": (COMPLETIONS, filled(b'{"prompt":[', b"1,", b"1]}")),
    "fractions": (COMPLETIONS, filled(b'{"prompt":[', b"1e1,", b"1]}")),
    "short texts": (COMPLETIONS, filled(b'{"prompt":[', b'"x",', b'"x"]}')),
    "text": (COMPLETIONS, filled(b'{"prompt":"', b"x ", b'"}')),
    "escapes": (COMPLETIONS, filled(b'{"prompt":"', b"\\ud83d\\ude00", b'"}')),
    "one number": (COMPLETIONS, filled(b'{"max_tokens":', b"9", b"}")),
    "one name": (COMPLETIONS, filled(b'{"', b"x", b'":1}')),
    "names": (COMPLETIONS, json.dumps({f"k{number}": 0 for number in range(99_000)}).encode()),
    "quotes": (COMPLETIONS, filled(b'{"prompt":["' + b"[" * 120_000 + b'",', b'"",', b'""]}')),
    "messages": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":"x"},', b'{"role":"user"}]}')),
    "many messages": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":"x"},', b'{"role":"user"}]}', 980_000)),
    "items": ("/v1/responses", filled(b'{"input":[', b'{"role":"user","content":"x"},', b'{"role":"user"}]}', 980_000)),
    "token ids": ("/detokenize", filled(b'{"tokens":[', b"1,", b"1]}")),
}


async def bodies(address: str, path: str, body: bytes, count: int) -> set[int]:
    head = post(path, f"content-length: {len(body)}")
    return {answer.status for answer in await asyncio.gather(*(exchanged(address, head, body) for _ in range(count)))}


async def unfinished(address: str, size: int, count: int) -> set[int]:
    """The statuses of the refused ones among many endless bodies."""
    begun = post(COMPLETIONS, f"content-length: {size + 10}"), *[PIECE] * (size // len(PIECE))
    tasks = [asyncio.create_task(exchanged(address, *begun)) for _ in range(count)]
    done, waiting = await asyncio.wait(tasks, timeout=3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return {task.result().status for task in done}


async def endless(address: str, begin: bytes, piece: bytes = PIECE) -> RawAnswer:
    return await exchanged(address, begin, *[piece] * 400)


class Witness:
    """Reads a stream in a thread, and remembers the longest gap between two of its pieces."""

    def __init__(self, address: str) -> None:
        self.longest_gap_s = 0.0
        self.num_pieces = 0
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body, kind = json.dumps({"prompt": "witness", "stream": True}), {"content-type": "application/json"}
        self._connection.request("POST", COMPLETIONS, body, kind)
        read_at, response = None, self._connection.getresponse()
        while not self._is_over.is_set():
            assert response.readline(), "the stream lasts"
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - (read_at or now))
            read_at, self.num_pieces = now, self.num_pieces + 1

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._connection.close()


@asynccontextmanager
async def witnessed(address: str) -> AsyncIterator[Witness]:
    witness = Witness(address)
    try:
        await until(lambda: witness.num_pieces)
        yield witness
        read = witness.num_pieces
        await until(lambda: witness.num_pieces > read)
    finally:
        await asyncio.to_thread(witness.close)


def ticking(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
    """Sends the witness a piece every 20 ms until it goes; answers others at once."""
    if request.prompt.text != "witness":
        yield from a_good_generation(request, context)
        return
    yield started()
    while context.is_active():
        yield chunk(5, text="a")
        time.sleep(0.02)


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) << 10


def limit_bytes() -> int:
    container = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]["template"]["spec"]["containers"][0]
    memory: str = container["resources"]["limits"]["memory"]
    assert memory.endswith("Mi")
    return int(memory[:-2]) << 20


async def test_no_flood_takes_more_memory_than_a_pod_has_or_stops_a_stream(verifier: FakeVerifier) -> None:
    verifier.script = ticking
    floods = {
        "target": lambda address: endless(address, b"GET /"),
        "value": lambda address: endless(address, GET + b"x: "),
        "name": lambda address: endless(address, GET),
        "fields": lambda address: endless(address, GET, b"a:\r\n" * 16_384),
        "extension": lambda address: endless(address, CHUNKED + b"2;"),
        "trailers": lambda address: endless(address, CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 10_000),
        "40 unfinished": lambda address: unfinished(address, 15 << 20, 40),
        "100 unfinished": lambda address: unfinished(address, 2 << 20, 100),
        **{
            f"8 of {name}": lambda address, path=path, body=body: bodies(address, path, body, 8)
            for name, (path, body) in BODIES.items()
        },
    }
    found = {}
    async with gateway_process("--upstream", verifier.address) as (process, address):
        for name, flood in floods.items():
            async with witnessed(address) as witness:
                await flood(address)
                found[name] = round(witness.longest_gap_s, 2), peak_bytes(process.pid) >> 20
    print(found)
    assert max(peak for _, peak in found.values()) << 20 < limit_bytes(), found
    assert max(gap for gap, _ in found.values()) < LONGEST_GAP_S, found
