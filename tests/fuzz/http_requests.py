"""Bytes sent to a gateway: good requests, and ones that are wrong in their JSON, their head or their framing.

Everything is drawn from one `random.Random`: the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.fuzz.examples import MAX_TOKENS
from tests.fuzz.mutations import DOUBLES, INTS, STRINGS

PROMPT = "def add(a, b):\n    return "
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
WORDS = (
    "type", "function", "name", "role", "content", "text", "json_schema", "schema", "regex", "grammar", "method",
    "card", "prompt", "messages", "max_tokens", "n", "5", "stream", "echo", "speculation", "__proto__", "",
)  # fmt: skip
DEPTHS = (5, 50, 400, 990, 3000, 100_000)
SLOW_CHANCE = 0.02


@dataclass(frozen=True, slots=True)
class Path:
    """A part of the API, and how to call it."""

    name: str
    path: str
    method: str
    body: Callable[[Random], dict[str, Any]] | None = None
    """Makes a good body; None: there is none."""
    is_endless: bool = False
    """True if a good answer may last longer than any test waits."""

    @property
    def rpc(self) -> str:
        """Its name, like gateway/completions."""
        return f"gateway/{self.name}"


@dataclass(frozen=True, slots=True)
class HttpCall:
    """The bytes of a connection: a function of the path, the seed and the number alone."""

    path: Path
    seed: int
    number: int
    pieces: tuple[bytes, ...]
    """Written one after another, as a network may cut them."""
    end: str
    """How the client ends: "read" everything, "half_close" and read, "leave" at once, "abort", or read "slowly"."""
    num_answers: int
    """Minimum number of answers; 0: as many as the gateway likes."""


def paths() -> dict[str, Path]:
    """Returns every part of the API by name."""
    found = (
        Path("chat_completions", "/v1/chat/completions", "POST", _chat, is_endless=True),
        Path("completions", "/v1/completions", "POST", _completion, is_endless=True),
        Path("responses", "/v1/responses", "POST", _response, is_endless=True),
        Path("messages", "/v1/messages", "POST", _message, is_endless=True),
        Path("count_tokens", "/v1/messages/count_tokens", "POST", lambda r: {"messages": _messages(r)}),
        Path("tokenize", "/tokenize", "POST", lambda r: r.choice(({"prompt": PROMPT}, {"messages": _messages(r)}))),
        Path("detokenize", "/detokenize", "POST", lambda r: {"tokens": [r.randrange(2048) for _ in range(9)]}),
        Path("lab", "/page/lab", "POST", _lab),
        Path("models", "/v1/models", "GET"),
        Path("health", "/health", "GET"),
        Path("load", "/page/load", "GET", is_endless=True),
        Path("page", "/page/page.js", "GET"),
    )
    return {path.rpc: path for path in found}


def make_call(path: Path, seed: int, number: int) -> HttpCall:
    """Returns the call with this number: one or a few requests, good or mutated, and an end."""
    random = Random(f"{seed} {path.rpc} {number}")
    kind = random.random()
    if kind < 0.04:
        # Several requests before the first answer.
        requests = [_request(path, random) for _ in range(random.randint(2, 5))]
        return _call(path, seed, number, random, b"".join(requests), len(requests), random.choice(("read", "leave")))
    if kind < 0.5:
        return _call(path, seed, number, random, _request(path, random), 1, _end(random))
    is_whole = kind < 0.75
    data = _request(path, random, head=_other_head) if is_whole else _other_bytes(_request(path, random), random)
    return _call(path, seed, number, random, data, 0, random.choice(("half_close", "half_close", "leave", "abort")))


def _call(path: Path, seed: int, number: int, random: Random, data: bytes, num_answers: int, end: str) -> HttpCall:
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3)))) if data else []
    begins = [0, *cuts]
    pieces = tuple(data[begin:stop] for begin, stop in zip(begins, [*cuts, len(data)], strict=True))
    return HttpCall(path, seed, number, pieces, end, num_answers if end in ("read", "slowly") else 0)


def _end(random: Random) -> str:
    if random.random() < SLOW_CHANCE:
        return "slowly"
    return random.choice(("read",) * 8 + ("half_close", "leave", "abort"))


# Good requests.


def _lab(random: Random) -> dict[str, Any]:
    return random.choice(
        ({"action": "kill_speculator"}, {"action": "set_delay", "delay_ms": random.choice((0, 40, 2.5))})
    )


def _completion(random: Random) -> dict[str, Any]:
    prompt = random.choice((PROMPT, [PROMPT, "class A"], [5, 6, 7], [[5, 6], [7]]))
    return {"prompt": prompt, **_common(random), **_sometimes(random, echo=True, logprobs=2, suffix=None)}


def _chat(random: Random) -> dict[str, Any]:
    more = _sometimes(random, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True, continue_final_message=False)
    return {"messages": _messages(random), **_common(random), **more}


def _response(random: Random) -> dict[str, Any]:
    given = random.choice(("hello", [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]))
    schema = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    tools = [{"type": "function", "name": "now", "parameters": {"type": "object"}}]
    more = _sometimes(
        random, instructions="Be brief.", text=schema, tools=tools, top_logprobs=2, include=[], store=False
    )
    return {"input": given, "max_output_tokens": random.randint(1, MAX_TOKENS), **_drawn(random), **more}


def _message(random: Random) -> dict[str, Any]:
    tools = [{"name": "now", "input_schema": {"type": "object"}}]
    more = _sometimes(random, system="Be brief.", tools=tools, stop_sequences=["\n\n"], tool_choice={"type": "auto"})
    return {"messages": _messages(random), "max_tokens": random.randint(1, MAX_TOKENS), **_drawn(random), **more}


def _drawn(random: Random) -> dict[str, Any]:
    return {
        "temperature": random.choice((0, 1)),
        "stream": random.random() < 0.5,
        **_sometimes(random, seed=5, top_p=0.9, metadata={}, speculation={"method": "pearl"}),
    }


def _messages(random: Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": random.choice(("hello", [{"type": "text", "text": "hello"}]))},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and now?"},
    ]
    return messages[: random.choice((1, 3))]


def _common(random: Random) -> dict[str, Any]:
    methods = ("off", "auto", "speculative", "pearl", "card", "retrieval", "opt_tree")
    stream = random.random() < 0.5
    options = {"stream_options": {"include_usage": True}} if stream and random.random() < 0.5 else {}
    return {
        "max_tokens": random.randint(1, MAX_TOKENS),
        "temperature": random.choice((0, 0.7, 1)),
        "seed": random.randrange(2**63),
        "stream": stream,
        **options,
        **_sometimes(
            random, n=2, stop=["\n\n", "self"], logit_bias={"5": 3.5}, min_tokens=1, frequency_penalty=0.3, top_p=0.9,
            repetition_penalty=1.1, bad_words=["return"], return_token_ids=True, top_k=40, user="me", metadata={},
            speculation={"method": random.choice(methods)}, speculation_report=["sources", "rounds", "trees"],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            prediction={"type": "content", "content": PROMPT}, truncate_prompt_tokens=9,
        ),
    }  # fmt: skip


def _sometimes(random: Random, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if random.random() < 0.15}


# JSON that nobody would send on purpose.


def _json(path: Path, random: Random) -> bytes:
    """Returns the body of a request; half of the bodies have other values somewhere."""
    if path.body is None:
        return b""
    value: Any = path.body(random)
    if random.random() < 0.5:
        for _ in range(random.choice((1, 1, 2, 4))):
            value = _changed(value, random)
    if path.is_endless and isinstance(value, dict):
        _tame(value)
    try:
        text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    except RecursionError:
        text = '{"a":' * 900 + "1" + "}" * 900
    if random.random() < 0.03:
        text = text.replace("1", "[" * (depth := random.choice(DEPTHS)) + "]" * depth, 1)
    return text.encode(errors="surrogatepass")


def _tame(body: dict[str, Any]) -> None:
    """Shortens a generation that would be long: generating is not what is tested here."""
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    if limit not in body and ("messages" in body or "input" in body):
        body[limit] = MAX_TOKENS
    if type(body.get(limit)) is int and body[limit] > MAX_TOKENS:
        body[limit] = MAX_TOKENS


def _changed(value: Any, random: Random) -> Any:
    """Returns the value with a change in one place."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        match random.randrange(8):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {**value, random.choice(WORDS): _strange(random)}
            case 2:
                return {**value, random.choice(STRINGS): value[key]}
        return {**value, key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        if random.random() < 0.2:
            # Bounded, because a body of gigabytes would burden this process, not the gateway.
            is_short = len(value) < 50 and not any(isinstance(each, list) and len(each) > 50 for each in value)
            return value * random.choice((0, 2, 300 if is_short else 1))
        return [*value[:index], _changed(value[index], random), *value[index + 1 :]]
    return _strange(random)


def _strange(random: Random) -> Any:
    match random.randrange(9):
        case 0:
            return random.choice(INTS)
        case 1:
            return random.choice(DOUBLES)
        case 2:
            return random.choice(STRINGS)
        case 3:
            return random.choice((None, True, False, [], {}, [None], {"": {}}))
        case 4:
            return random.choice((10**400, -(10**4000), 2**63, 2**64, -(2**63) - 1))
        case 5:
            return random.choice(("\ud800", "\udfff\ud800", "\\u0000", "\x7f", "\u2028", "é" * 9))
        case 6:
            value: Any = random.choice(WORDS)
            for _ in range(random.choice((3, 30, 300))):
                value = [value] if random.random() < 0.5 else {random.choice(WORDS): value}
            return value
        case 7:
            return [random.randrange(-5, 2100) for _ in range(random.choice((1, 40, 5000)))]
    return {word: random.choice(INTS) for word in random.sample(WORDS, 4)}


# Heads and framing.

JSON = "content-type: application/json"


def _request(path: Path, random: Random, head: Callable[..., bytes] | None = None) -> bytes:
    body = _json(path, random)
    if head is not None:
        return head(path, random, body)
    fields = ["host: localhost", *([JSON, f"content-length: {len(body)}"] if path.method == "POST" else [])]
    return _head(f"{path.method} {path.path} HTTP/1.1", fields) + body


def _head(line: str, fields: list[str]) -> bytes:
    return ("\r\n".join([line, *fields]) + "\r\n\r\n").encode("latin-1", "replace")


def _other_head(path: Path, random: Random, body: bytes) -> bytes:
    """Returns a request with a wrong request line, wrong fields or wrong framing."""
    line, length, more = f"{path.method} {path.path} HTTP/1.1", f"content-length: {len(body)}", "accept: */*"
    match random.randrange(6):
        case 0:
            near = random.choice(LENGTHS)
            length = f"content-length: {near if isinstance(near, str) else max(0, len(body) + near)}"
        case 1:
            method = random.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE", "P\0ST", ""))
            line = f"{method} {path.path} HTTP/1.1"
        case 2:
            target = random.choice(TARGETS).replace("PATH", path.path)
            line = f"{path.method} {target} {random.choice(VERSIONS)}"
        case 3:
            more = random.choice(FIELDS)
        case 4:
            more, length = "transfer-encoding: chunked", ""
            body = _chunked(body, random)
        case 5:
            more = "\r\n".join(random.sample(FIELDS, 4))
    # If it is among the others, the head has it twice.
    return _head(line, [field for field in ("host: localhost", JSON, length, more) if field]) + body


LENGTHS = (-1, -20, 1, 1000, 2**31, "-1", "x", "1e3", "0x10", "+5", "9" * 30, "5, 5", "")
"""Content lengths: numbers are added to the right one, strings replace it."""
TARGETS = (
    "PATH/", "PATH?a=b&a=%00", "/v1PATH", "//PATH", "/../../etc/passwd", "/page/../../pyproject.toml",
    "/page/%2e%2e%2f", "/page/%00", "/page/" + "a" * 5000 + ".js", "/%ff%fe", "/v1/models/%00",
    "/v1/models/" + "a" * 5000, "http://else.example/PATH", "*", "PATH#x", "/é", "PATH;a=b", "",
)  # fmt: skip
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "", "ICE/1.0")
FIELDS = (
    "content-type: text/plain", "content-type: multipart/form-data", "content-type: \0", "content-encoding: gzip",
    "authorization: Bearer", "authorization: Bearer a b", "authorization: Basic YTpi", "authorization: Bearer \xff\xfe",
    "authorization: Bearer " + "t" * 9000, "x-api-key: \x01", "expect: 100-continue", "upgrade: websocket",
    "connection: upgrade", "connection: close", "host: a\r\nhost: b", "origin: http://else.example", "te: trailers",
    "a" * 9000 + ": b", "x: " + "y" * 70_000, " folded: field", "no colon", ": no name", "x-request-id: \r",
    "content-length: 3", "transfer-encoding: gzip, chunked", "traceparent: 00-zz-zz-01", "accept: nothing/at-all",
)  # fmt: skip


def _chunked(body: bytes, random: Random) -> bytes:
    """Returns a body in chunks, some of which are malformed."""
    parts = [body[begin : begin + 20] for begin in range(0, len(body), 20)]
    sizes = [f"{len(part):x}" for part in parts]
    if sizes and random.random() < 0.5:
        sizes[random.randrange(len(sizes))] = random.choice(("zz", "-1", "ffffffffffffffff", "0", "5;a=b", ""))
    chunks = [size.encode() + b"\r\n" + part + b"\r\n" for size, part in zip(sizes, parts, strict=True)]
    return b"".join(chunks) + random.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", b"0\r\n"))


def _other_bytes(data: bytes, random: Random) -> bytes:
    """Returns the bytes cut short, or with some of them changed."""
    where = random.randrange(len(data))
    match random.randrange(5):
        case 0:
            return data[:where]
        case 1:
            return data[:where] + bytes([random.randrange(256)]) + data[where + 1 :]
        case 2:
            return data[:where] + random.randbytes(random.choice((1, 4, 40))) + data[where:]
        case 3:
            return data[:where] + data[where + random.choice((1, 2, 30)) :]
    return random.choice(
        (random.randbytes(200), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02", b"\r\n" * 50, b"")
    )
