"""A Hugging Face hub on loopback: the part of its HTTP API that downloads use, with files in memory, and faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """One model at one commit."""

    model: str
    commit: str
    files: dict[str, bytes]
    token: str = ""
    """A caller without this token is told what the hub tells of a gated model; empty = anybody may read."""
    instead: dict[str, bytes] = field(default_factory=dict)
    """What is sent in place of a file's content."""
    is_broken: bool = False
    """True if it refuses everything, without a reason."""
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bytes of the file after which the connection is closed, once."""
    downloads: list[str] = field(default_factory=list)
    """Requested paths, in order."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Contents are sent once this is set."""
    address: str = ""

    def is_large(self, path: str) -> bool:
        """True if git holds a pointer only, and the content lies elsewhere."""
        return path.endswith(".safetensors")

    def tree(self) -> list[dict[str, Any]]:
        """What the hub lists."""
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "original", "oid": "0" * 40, "size": 0}]
        for path, content in self.files.items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
            if self.is_large(path):
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
                entry["oid"] = hashlib.sha1(path.encode()).hexdigest()
            else:
                entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entries.append(entry)
        return entries


def sha256(content: bytes) -> str:
    """Hex."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serves it on a free port; its address is http://127.0.0.1:PORT."""

    class Requests(_Requests):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    hub.gate.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: pytest's output is not a server's log."""

    def _answer(self) -> None:
        hub, path = self.of, unquote(urlsplit(self.path).path)
        api, resolve = f"/api/models/{hub.model}/", f"/{hub.model}/resolve/"
        if hub.is_broken:
            self._refuse(400, "")
        elif path.startswith("/content/"):
            self._send_content(path.removeprefix("/content/"))
        elif not path.startswith((api, resolve)):
            self._refuse(404, "RepoNotFound")
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(403, "GatedRepo")
        elif path.startswith(api):
            kind, _, revision = path.removeprefix(api).partition("/")
            if revision not in (hub.commit, "main"):
                self._refuse(404, "RevisionNotFound")
            elif kind == "tree":
                self._send_json(hub.tree())
            else:
                self._send_json(
                    {"id": hub.model, "sha": hub.commit, "siblings": [{"rfilename": name} for name in hub.files]}
                )
        else:
            revision, _, name = path.removeprefix(resolve).partition("/")
            if revision != hub.commit or name not in hub.files:
                self._refuse(404, "EntryNotFound")
            else:
                self._send_file(name)

    def _send_file(self, name: str) -> None:
        content = self.of.files[name]
        if not self.of.is_large(name):
            return self._send_content(name)
        self.send_response(302)
        # On another host, like the hub's files: the library takes the size from here and shows no token there.
        self.send_header("Location", f"{self.of.address.replace('127.0.0.1', 'localhost')}/content/{name}")
        self.send_header("X-Repo-Commit", self.of.commit)
        self.send_header("X-Linked-Etag", f'"{sha256(content)}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def _send_content(self, name: str) -> None:
        hub = self.of
        content = hub.instead.get(name, hub.files[name])
        begin = 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", f'"{hashlib.sha1(hub.files[name]).hexdigest()}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        hub.downloads.append(name)
        hub.gate.wait()
        end = hub.cut.pop(name, len(content))
        self.wfile.write(content[begin:end])
        if end < len(content):
            self.close_connection = True

    def _send_json(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
