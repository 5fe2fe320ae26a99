"""What the page requests: its files, the load of the server, and the buttons that break things."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider_gateway.page import routes
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import running_gateway


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of static files, and a secret next to it."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text("<p>hi</p>")
    (folder / "page.js").write_text("1")
    (folder / "secret.txt").write_text("no")
    (tmp_path / "beside.js").write_text("no")
    monkeypatch.setattr(routes, "STATIC", folder)
    return folder


async def test_files_come_with_their_type_and_may_load_nothing_else(verifier: FakeVerifier, static: Path) -> None:
    async with running_gateway(verifier.address) as gateway:
        page, script = await gateway.http.get("/"), await gateway.http.get("/page/page.js")
        again = await gateway.http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert page.text == "<p>hi</p>"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")
    for response in (page, script, again):
        assert response.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "none.js",
        "secret.txt",
        "..%2fbeside.js",
        "%2e%2e/beside.js",
        "..//beside.js",
        "%00",
        "%00.js",
        f"{'a' * 5000}.js",
    ],
)
async def test_nothing_else_is_a_file_of_the_page(verifier: FakeVerifier, static: Path, path: str) -> None:
    async with running_gateway(verifier.address) as gateway:
        answered = await gateway.http.get(f"/page/{path}")
    assert answered.status_code == 404
    assert answered.json()["error"]["code"] == "not_found"


async def test_without_the_page_there_is_none(verifier: FakeVerifier, static: Path) -> None:
    async with running_gateway(verifier.address, page=False) as gateway:
        for path in ("/", "/page/load", "/page/lab", "/page/page.js"):
            assert (await gateway.http.get(path)).status_code == 404


async def test_the_load_comes_again_and_again_until_the_gateway_drains(verifier: FakeVerifier) -> None:
    async with (
        running_gateway(verifier.address) as gateway,
        gateway.http.stream("GET", "/page/load") as response,
    ):
        lines = response.aiter_lines()
        for _ in range(2):
            assert await anext(lines) == "event: load"
            told = json.loads((await anext(lines)).removeprefix("data: "))
            assert await anext(lines) == ""
        assert told["model"]["id"] == "fake"
        assert "pearl" in told["methods"]
        assert told["datastore"] is None
        gateway.server.drain()
        assert [line async for line in lines if line.startswith("error")] == []


@asynccontextmanager
async def lab(path: Path) -> AsyncIterator[list[dict[str, object]]]:
    """A socket of `outrider up` that records the requests."""
    seen: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(json.loads(await reader.readline()))
        state = {"error": "it is dead"} if len(seen) > 3 else {"speculator": "running", "delay_ms": 0}
        writer.write(json.dumps(state).encode() + b"\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        yield seen


async def test_the_lab_is_asked_through_its_socket(verifier: FakeVerifier, tmp_path: Path) -> None:
    path = tmp_path / "lab"
    async with lab(path) as seen, running_gateway(verifier.address, lab_socket=str(path)) as gateway:
        state = (await gateway.http.get("/page/lab")).json()
        assert state == {"actions": ["kill_speculator", "set_delay"], "speculator": "running", "delay_ms": 0}
        assert (await gateway.post("/page/lab", action="kill_speculator")).status_code == 200
        origin = {"origin": f"http://{gateway.address}"}
        delay = {"action": "set_delay", "delay_ms": 40}
        assert (await gateway.http.post("/page/lab", json=delay, headers=origin)).status_code == 200
        assert seen == [{"action": "state"}, {"action": "kill_speculator"}, delay]
        failed = await gateway.post("/page/lab", action="kill_speculator")
        assert failed.json()["error"]["message"] == "it is dead"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
async def test_a_page_of_somebody_else_breaks_nothing(
    verifier: FakeVerifier, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    path = tmp_path / "lab"
    async with lab(path) as seen, running_gateway(verifier.address, lab_socket=str(path)) as gateway:
        body = b'{"action": "kill_speculator"}'
        head = {"content-type": "application/json", **headers}
        assert (await gateway.http.post("/page/lab", content=body, headers=head)).status_code == status
        assert seen == []


async def test_without_a_lab_there_is_nothing_to_break(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address) as gateway:
        assert (await gateway.http.get("/page/lab")).json() == {"actions": []}
        assert (await gateway.post("/page/lab", action="kill_speculator")).status_code == 404
