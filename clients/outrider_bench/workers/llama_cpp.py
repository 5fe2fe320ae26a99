"""llama.cpp's server as a peer in the benchmark: the same weights as GGUF files, one server for each setting.

    python -m outrider_bench.workers.llama_cpp --target demo/target-100m --draft demo/draft \\
        --dtype bfloat16 --draft-dtype float32

How much is drafted is a flag of llama-server, not a field of a request, so every setting has a process. Those that are
not asked sleep. Nothing is downloaded: the models are files that this process has written.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.models.text import TextCodec
from outrider_bench.workers.gguf_file import write_gguf
from outrider_bench.workers.worker import Handler, Stopwatch, encode, serve_pair
from outrider_cli.local.die_with_parent import die_with_parent
from outrider_cli.local.redis import free_port

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 50.0
"""Less than the benchmark waits for this process, which must answer before it is given up."""
_POLL_S = 0.02
_STOP_TIMEOUT_S = 5.0
_MAX_CONTEXT_LEN = 4096
"""Tokens of the cache that a server allocates at its start; prompts of the benchmark are far shorter."""
_MOST_DRAFTED = ("--spec-draft-n-max", "--draft-max")
"""Names of one flag, in newer and in older releases."""


class NotALlamaServer(ValueError):
    """The program is no llama-server, or one without draft models. The message names the flag."""


class ServerFailed(RuntimeError):
    """A server did not start, ended, or refused a request. The message is one line."""


class LlamaServer:
    """Runs one `llama-server`, which answers one request at a time."""

    def __init__(self, command: Sequence[str], cores: Collection[int], log: Path) -> None:
        """Starts it, and waits for nothing.

        Args:
            command: The program and its flags, except the address.
            cores: Cores of all its threads; empty means any.
            log: File for its output.
        """
        self._log = log
        self._port = free_port()
        address = ["--host", HOST, "--port", str(self._port)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                die_with_parent([*command, *address], cores),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # so that Ctrl-C in the terminal does not reach it before us
            )

    def wait_serving(self) -> None:
        """Returns when it has loaded its models. Raises ServerFailed if it ends, or takes longer than
        START_TIMEOUT_S."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_serving():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"llama-server did not start: {self._last_words()}")
            time.sleep(_POLL_S)

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts a request to /completion, and returns the answer. Raises ServerFailed."""
        connection = HTTPConnection(HOST, self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read().decode()
        except (OSError, HTTPException) as error:
            raise ServerFailed(f"llama-server did not answer: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ServerFailed(f"llama-server refused: {answer.strip()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def stop(self) -> None:
        """Ends it: first it asks, then it kills."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_serving(self) -> bool:
        connection = HTTPConnection(HOST, self._port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200  # 503 while it loads
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


class LlamaCppPeer:
    """The pair as files, and the servers that have loaded it."""

    def __init__(self, target: Any, draft: Any, tokenizer: Any, stack: ExitStack) -> None:
        """Writes the files.

        Args:
            target: See `write_gguf`.
            draft: Likewise; it has the target's tokenizer.
            tokenizer: Of both.
            stack: Deletes the files and stops the servers when it is closed.

        Raises:
            CannotConvert: A model is of a kind that cannot be written.
        """
        self._stack = stack
        self._folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-llama-cpp-")))
        self._codec = TextCodec(tokenizer)
        self._context_len = min(target.config.max_position_embeddings, _MAX_CONTEXT_LEN)
        self._servers: dict[str, LlamaServer] = {}
        for name, model in (("target", target), ("draft", draft)):
            write_gguf(model, tokenizer, self._folder / f"{name}.gguf")

    def start(self, program: str, cores: list[int], settings: list[dict[str, Any]]) -> dict[str, Any]:
        """Starts a server for each setting, and waits until all serve.

        Args:
            program: Path of llama-server.
            cores: Cores of each server, which its models share; empty means any.
            settings: At most `max_drafted` tokens of the draft model at a time, while it is `min_probability` sure of
                the next one; an empty setting has no draft model.

        Raises:
            NotALlamaServer: The program is something else.
            ServerFailed: A server does not start.
        """
        known = _flags_of(program)
        for number, setting in enumerate(settings):
            command = [program, *self._flags(known, cores), *self._draft_flags(known, setting)]
            server = LlamaServer(command, cores, self._folder / f"server-{number}.log")
            self._stack.callback(server.stop)
            self._servers[_key_of(setting)] = server
        for server in self._servers.values():
            server.wait_serving()
        return {}

    def generate(self, request: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one generation, and times it."""
        watch = Stopwatch()
        prompt = encode(self._codec, request["prompt"])
        answer = self._servers[_key_of(options)].complete(completion_request(prompt, request))
        duration_s = watch.elapsed_s()
        token_ids, timings = answer["tokens"], answer["timings"]
        num_accepted = timings.get("draft_n_accepted", 0)
        return {
            "num_prompt_tokens": len(prompt),
            "token_ids": token_ids,
            # The answer comes as a whole: a stream would lack tokens that end within a character.
            "chunks": [],
            "duration_s": duration_s,
            "rounds": {
                # Each forward brings one token of the target's own; all others were drafts.
                "num_rounds": len(token_ids) - num_accepted,
                "num_drafted": timings.get("draft_n", 0),
                "num_accepted": num_accepted,
            },
        }

    def _flags(self, known: str, cores: Collection[int]) -> list[str]:
        flags = ["--model", str(self._folder / "target.gguf"), "--ctx-size", str(self._context_len), "--parallel", "1"]
        flags += ["--threads", str(len(set(cores)))] if cores else []
        # Otherwise it would keep the prompts of earlier requests: many copies of the cache, for prompts that never
        # recur.
        return flags + (["--cache-ram", "0"] if "--cache-ram" in known else [])

    def _draft_flags(self, known: str, setting: Mapping[str, Any]) -> list[str]:
        if not setting:
            return []
        most = next(flag for flag in _MOST_DRAFTED if flag in known)
        flags = ["--model-draft", str(self._folder / "draft.gguf"), most, str(setting["max_drafted"])]
        flags += ["--draft-p-min", str(setting["min_probability"])]
        # Newer releases have several ways to draft, and use a model only if they are told to.
        return flags + (["--spec-type", "draft-simple"] if "--spec-type" in known else [])


def completion_request(prompt: Sequence[int], request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the body of a request to /completion: plain sampling, no cached prompt, exactly the requested tokens.

    The prompt is token ids, so that llama.cpp's own splitting rules do not matter.
    """
    return {
        "prompt": list(prompt),
        "n_predict": request["max_tokens"],
        "temperature": request["temperature"],
        "seed": request["seed"],
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def _flags_of(program: str) -> str:
    """Returns the text that lists the flags of a llama-server. Raises NotALlamaServer."""
    rule = "a llama-server that takes --model-draft"
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, text=True, errors="replace", timeout=START_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        raise NotALlamaServer(f"--llama-server must be {rule}, got {program!r}") from None
    text = done.stdout + done.stderr
    if "--model-draft" not in text or not any(flag in text for flag in _MOST_DRAFTED):
        raise NotALlamaServer(f"--llama-server must be {rule}, got {program!r}")
    return text


def _key_of(setting: Mapping[str, Any]) -> str:
    return json.dumps(dict(setting), sort_keys=True)


def main() -> None:
    """Runs the worker."""
    with ExitStack() as stack:

        def open_pair(target: Any, draft: Any, tokenizer: Any) -> Mapping[str, Handler]:
            peer = LlamaCppPeer(target, draft, tokenizer, stack)
            return {"start": peer.start, "generate": peer.generate}

        serve_pair(__doc__, open_pair)


if __name__ == "__main__":
    main()
