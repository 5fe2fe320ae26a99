"""A gateway under fire: its answers on a connection, and its health afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httptools
import httpx

from outrider_cli.local.lab import Lab, LabSocket
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import LocalStack
from tests.fuzz.http_requests import HttpCall
from tests.fuzz.servers import ANSWER_S, IDLE_S, SIGNS

PATIENCE_S = 2.0
"""Time for which an answer without an end is read."""
LATE_S = 45.0
"""Time after which no answer comes any more: more than the gateway allows for the head and the body of a request."""
REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 429, 431)
"""Statuses that a client's own mistakes, or other clients' load, may cause. 409: the laboratory has no link to delay;
429: all sessions are in use."""


class Answers:
    """Reads the answers on a connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self.statuses: list[int] = []
        """Statuses of complete answers."""
        self.problems: list[str] = []
        """Properties that no answer may have."""

    def feed(self, data: bytes) -> None:
        """Parses bytes from the gateway."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problems.append(f"no HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of a body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Checks an answer."""
        status, body, self._body = self._parser.get_status_code(), self._body, b""
        if status < 200:
            return  # "100 Continue" comes before the answer
        self.statuses.append(status)
        if status != 200 and status not in REFUSALS:
            self.problems.append(f"status {status}: {body[:400]!r}")
        elif status != 200:
            self._check_envelope(body)
        elif b'"internal_error"' in body:
            self.problems.append(f"an event tells of our own fault: {body[-400:]!r}")

    def _check_envelope(self, body: bytes) -> None:
        try:
            told = json.loads(body)
            # Anthropic's has a type of its own.
            names = {"message", "type"} if told.get("type") == "error" else {"message", "type", "param", "code"}
            is_envelope = told["error"].keys() == names and bool(told["error"]["message"])
        except (ValueError, KeyError, TypeError, AttributeError):
            is_envelope = False
        # An answer to HEAD, and an answer to CORS, have no body.
        if body and not is_envelope:
            self.problems.append(f"an error without the envelope: {body[:400]!r}")


class FuzzedGateway:
    """The process of a gateway in front of a stack, and checks of its health."""

    def __init__(self, process: ManagedProcess) -> None:
        self._process = process
        self._mark = process.log.stat().st_size
        host, _, port = process.address.rpartition(":")
        self._host, self._port = host, int(port)

    async def send(self, call: HttpCall) -> tuple[str, float, str]:
        """Makes the call.

        Returns:
            A word for the result, the seconds that it took, and what is wrong with it; empty = nothing.
        """
        began = time.monotonic()
        answers = Answers()
        problem = ""
        try:
            async with asyncio.timeout(LATE_S):
                await self._converse(call, answers)
        except TimeoutError:
            problem = "the connection has not ended"
        except ConnectionRefusedError:
            problem = "the connection is refused"
        except OSError:
            pass  # it may have been closed because of what was sent
        if answers.problems:
            problem = "; ".join(answers.problems)
        elif call.num_answers > len(answers.statuses) and not call.path.is_endless:
            problem = problem or f"{len(answers.statuses)} answers in place of {call.num_answers}"
        word = "+".join(sorted({str(status) for status in answers.statuses})) or call.end
        return word, time.monotonic() - began, problem

    async def _converse(self, call: HttpCall, answers: Answers) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            for piece in call.pieces:
                writer.write(piece)
                await writer.drain()
            if call.end == "abort":
                _reset_on_close(writer)
            if call.end in ("leave", "abort"):
                return
            if call.end == "half_close":
                writer.write_eof()
            wait_s = PATIENCE_S if call.path.is_endless else LATE_S
            # An endless answer is not read any further.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await _read(reader, answers, call)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @property
    def memory_mb(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4 >> 10

    async def problems(self) -> list[str]:
        """Returns what is wrong with it, or an empty text: it answers good requests, runs none, and logged no bug."""
        if not self._process.is_running:
            return [f"the gateway has ended: {self._process.log_tail()}"]
        found = []
        async with httpx.AsyncClient(base_url=f"http://{self._process.address}", timeout=ANSWER_S) as http:
            try:
                found += await self._check_idle(http)
                body = {"prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
                answer = await http.post("/v1/completions", json=body)
                if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 4:
                    found.append(f"the gateway answers a good request with {answer.status_code} {answer.text[:400]}")
            except httpx.HTTPError as error:
                found.append(f"the gateway does not answer a good request: {type(error).__name__} {error}")
        with self._process.log.open("rb") as log:
            log.seek(self._mark)
            text = log.read().decode(errors="replace")
            self._mark = log.tell()
        found += [f"the gateway logged: {text[max(0, sign.start() - 300) : sign.end() + 2500]}"
                  for sign in list(SIGNS.finditer(text))[:2]]  # fmt: skip
        return found

    async def _check_idle(self, http: httpx.AsyncClient) -> list[str]:
        loop = asyncio.get_running_loop()
        until = loop.time() + IDLE_S
        while True:
            metrics = (await http.get("/metrics")).text
            busy = [line for line in metrics.splitlines()
                    if line.startswith(("outrider_gateway_streams ", "vllm:num_requests_running "))
                    and not line.endswith(" 0.0")]  # fmt: skip
            if not busy:
                return []
            if loop.time() > until:
                return [f"the gateway still runs requests: {busy}"]
            await asyncio.sleep(0.05)


async def _read(reader: asyncio.StreamReader, answers: Answers, call: HttpCall) -> None:
    while call.end == "half_close" or len(answers.statuses) < max(1, call.num_answers):
        data = await reader.read(64 if call.end == "slowly" else 65536)
        if not data:
            return
        answers.feed(data)
        if answers.problems:
            return
        if call.end == "slowly":
            await asyncio.sleep(0.002)


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Ends the connection with a reset, as a crashed client does."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def running_gateway(stack: LocalStack, log_folder: Path) -> Iterator[FuzzedGateway]:
    """Runs a gateway before a stack, with a laboratory for its page."""
    arguments = ["--upstream", stack.address, "--lab-socket", str(log_folder / "lab")]
    process = ManagedProcess("gateway", "outrider_gateway", arguments, log_folder / "gateway.log", listen="127.0.0.1:0")
    with _served_lab(stack, log_folder / "lab"):
        try:
            process.start()
            yield FuzzedGateway(process)
        finally:
            process.stop()


@contextmanager
def _served_lab(stack: LocalStack, path: Path) -> Iterator[None]:
    """Serves the laboratory of a stack. It can do everything except kill, which would show in others' logs."""
    is_over = threading.Event()
    with selectors.DefaultSelector() as selector:
        lab = LabSocket(path, Lab(stack, lambda process, seconds: None), selector)

        def serve() -> None:
            while not is_over.is_set():
                for key, _ in selector.select(0.05):
                    key.data()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            lab.close()
