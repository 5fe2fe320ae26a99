"""A program with llama-server's command line and HTTP, and no model. Shows what a real one is asked, and how it fails.

Run as a script by the program that `program` writes. Its /completion also reports its flags and the request.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

NEW_FLAGS = ("--model-draft", "--spec-draft-n-max", "--draft-p-min", "--spec-type", "--cache-ram")
OLD_FLAGS = ("--model-draft", "--draft-max", "--draft-p-min")


def program(folder: Path, flags: tuple[str, ...] = NEW_FLAGS, *, last_words: str = "") -> str:
    """Writes an executable into the folder; `flags` is what its --help lists.

    With `last_words` it prints them and ends, for any arguments except --help.
    """
    path = folder / "llama-server"
    # A shell script: the path of an interpreter may be too long for a first line.
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "{" ".join(flags)}" "{last_words}" "$@"\n')
    path.chmod(0o755)
    return str(path)


class Handler(BaseHTTPRequestHandler):
    """Answers as llama-server does, each request with as many tokens as it asks for, counting up."""

    def do_GET(self) -> None:
        self._answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["n_predict"] > 1000:
            self._answer(400, {"error": {"message": "too many tokens"}})
            return
        timings = {"draft_n": 9, "draft_n_accepted": 4} if "--model-draft" in sys.argv else {}
        tokens = list(range(body["n_predict"]))
        self._answer(200, {"tokens": tokens, "timings": timings, "heard": body, "flags": sys.argv[3:]})

    def log_message(self, *_: Any) -> None:
        """Logs nothing: output is only for its end."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main() -> None:
    _, flags, last_words, *arguments = sys.argv
    if arguments == ["--help"]:
        print(flags)
    elif last_words:
        sys.exit(last_words)
    else:
        address = arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1])
        HTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
