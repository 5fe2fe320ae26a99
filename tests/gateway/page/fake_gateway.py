"""A gateway without a verifier: serves the page as the real one does, and replays a recorded race."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider_gateway.page.routes import HEADERS, KINDS, STATIC, legend
from outrider_gateway.streams import STREAM_HEADERS

RACE = Path(__file__).parent / "race.json"
"""The page's recording of a race against a real gateway with the demo pair in float32."""
FAST = "200 rounds a second"
"""The prompt that is answered with lane after lane, for ten seconds."""


class FakeGateway:
    """Plays the recording, and counts the requests."""

    def __init__(self) -> None:
        """Starts with a running draft model."""
        self.race: dict[str, Any] = json.loads(RACE.read_text(encoding="utf-8"))
        self.lab = {"speculator": "running", "delay_ms": 0, "actions": ["kill_speculator", "set_delay"]}
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.is_chat = False
        """Whether the model was trained to chat."""
        self.token = ""
        """The token that requests for the load must have; empty means none."""

    def app(self) -> Starlette:
        """Returns the routes that the page uses."""
        return Starlette(
            routes=[
                Route("/", self.file),
                Route("/page/load", self.load),
                Route("/page/lab", self.look, methods=["GET"]),
                Route("/page/lab", self.act, methods=["POST"]),
                Route("/page/{name}", self.file),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def file(self, request: Request) -> Response:
        """Sends a static file with the headers of the real gateway."""
        path = STATIC / request.path_params.get("name", "index.html")
        content = legend() if path.name == "methods.json" else path.read_bytes()
        return Response(content, headers={**HEADERS, "content-type": KINDS[path.suffix]})

    async def load(self, request: Request) -> Response:
        """Sends the load once, and keeps the stream open."""
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": {"message": "the token is wrong"}}, status_code=401)
        told = {
            "num_sessions": 1,
            "max_num_sessions": 64,
            "num_queued": 0,
            "kv_pool": {"num_tokens": 1000, "num_held_tokens": 100},
            "speculators": [{"connected": True}],
            "datastore": None,
            "model": {**self.race["model"], "is_chat": self.is_chat},
            "methods": ["off", "auto"],
            "num_requests": 1,
        }

        async def events() -> AsyncIterator[str]:
            yield f"event: load\ndata: {json.dumps(told)}\n\n"
            await asyncio.Event().wait()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def look(self, _: Request) -> Response:
        """Reports what is broken."""
        return JSONResponse(self.lab)

    async def act(self, request: Request) -> Response:
        """Breaks something."""
        action = await request.json()
        if action["action"] == "kill_speculator":
            self.lab["speculator"] = "killed"
        else:
            self.lab["delay_ms"] = action["delay_ms"]
        return JSONResponse(self.lab)

    async def complete(self, request: Request) -> Response:
        """Streams the recorded lane of the method, four times as fast."""
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        if body["temperature"] > 2:
            error = {"message": "temperature must be at most 2", "param": "temperature"}
            return JSONResponse({"error": error}, status_code=400)
        lane = next(lane for lane in self.race["lanes"] if lane["method"] == body["speculation"]["method"])
        timed: Iterable[tuple[float, dict[str, Any]]] = ((at_ms / 4, event) for at_ms, event in lane["events"])
        if body.get("prompt") == FAST:
            timed = self.fast(lane)

        async def events() -> AsyncIterator[str]:
            clock = asyncio.get_running_loop().time
            start = clock()
            for at_ms, event in timed:
                await asyncio.sleep(start + at_ms / 1000 - clock())
                yield f"data: {json.dumps(_of_chat(event) if 'messages' in body else event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), headers=STREAM_HEADERS)

    def fast(self, lane: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yields the lane's rounds over and over, one each 5 ms."""
        rounds = [event for _, event in lane["events"] if event["choices"] and event["choices"][0].get("speculation")]
        length = 0
        for number, event in enumerate(itertools.islice(itertools.cycle(rounds), 2000)):
            choice = event["choices"][0]
            speculation, text = choice["speculation"], choice["text"]
            before = speculation["text_ends"][-1] - len(text)
            ends = [end - before + length for end in speculation["text_ends"]]
            length += len(text)
            yield number * 5, {"choices": [{**choice, "speculation": {**speculation, "text_ends": ends}}]}


def _of_chat(event: dict[str, Any]) -> dict[str, Any]:
    """Converts an event of a completion to one of a chat."""
    return {**event, "choices": [_choice_of_chat(choice) for choice in event["choices"]]}


def _choice_of_chat(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice.get("logprobs")
    tokens = [] if logprobs is None else zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    content = [{"token": token, "logprob": logprob, "top_logprobs": []} for token, logprob in tokens]
    rest = {name: value for name, value in choice.items() if name not in ("text", "logprobs")}
    return {**rest, "delta": {"content": choice["text"]}, "logprobs": logprobs and {"content": content}}


@contextmanager
def running() -> Iterator[tuple[FakeGateway, str]]:
    """Yields a fake gateway and its address."""
    gateway = FakeGateway()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Loggers belong to the process: those of the real gateway in other tests must not change.
        config = uvicorn.Config(gateway.app(), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield gateway, f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            # The stream of the load has no end of its own.
            server.should_exit = server.force_exit = True
            thread.join()
