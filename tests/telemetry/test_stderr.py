"""Writes to stderr neither wait nor fail, and dropped lines are counted and reported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import pytest

from outrider.telemetry.stderr import Stderr
from tests.support.bad_stderr import KINDS, Kind, bad_stderr, started


@pytest.fixture
def pipe() -> Iterator[tuple[IO[str], Stderr]]:
    """The end that is read, and the stream that is written to."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as read:
        yield read, Stderr(writing)
    os.close(writing)


def written(number: int) -> str:
    """A line of 100 characters."""
    return f"{number:099d}\n"


def test_lines_come_out_whole_and_in_order(pipe: tuple[IO[str], Stderr]) -> None:
    read, stderr = pipe
    print("one", 1, file=stderr)
    stderr.write("two")
    stderr.write(" and\nthree")
    print("\n\ud800", file=stderr)
    stderr.drain()
    assert [read.readline() for _ in range(4)] == ["one 1\n", "two and\n", "three\n", "\\ud800\n"]
    assert stderr.num_dropped == 0


def test_threads_do_not_tear_each_others_lines(pipe: tuple[IO[str], Stderr]) -> None:
    read, stderr = pipe
    writers = [
        threading.Thread(target=lambda name=name: [print(name, name, name, file=stderr) for _ in range(100)])
        for name in "abcd"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stderr.drain()
    assert {read.readline() for _ in range(400)} == {f"{name} {name} {name}\n" for name in "abcd"}


def test_a_pipe_that_nobody_reads_keeps_no_writer_waiting_and_the_gap_is_told(pipe: tuple[IO[str], Stderr]) -> None:
    read, stderr = pipe
    num_lines = 20_000
    for number in range(num_lines):
        stderr.write(written(number))
    began = time.monotonic()
    stderr.drain(0.1)
    assert time.monotonic() - began < 1
    assert stderr.num_dropped > num_lines / 2
    read_lines = iter(read.readline, f"{num_lines:099d}\n")
    threading.Thread(target=lambda: (stderr.drain(), stderr.write(written(num_lines)))).start()
    numbers, num_missing = [], 0
    for line in read_lines:
        if told := re.fullmatch(r"(\d+) lines of the log were dropped here\n", line):
            num_missing += int(told[1])
        else:
            numbers.append(int(line))
            # Each gap is reported where it is.
            assert numbers[-1] == len(numbers) - 1 + num_missing
    assert (num_missing, len(numbers)) == (stderr.num_dropped, num_lines - stderr.num_dropped)


def test_a_place_that_takes_lines_again_is_told_how_many_it_missed(tmp_path) -> None:
    path = tmp_path / "log"
    place = os.open(path, os.O_WRONLY | os.O_CREAT)
    stderr = Stderr(place)
    stderr.write("before\n")
    stderr.drain()
    # The number stands for a full disk, then for the file again.
    full, log = os.open("/dev/full", os.O_WRONLY), os.dup(place)
    os.dup2(full, place)
    stderr.write("lost\nlost, too\n")
    stderr.write("lost\n")
    stderr.drain()
    os.dup2(log, place)
    stderr.write("after\n")
    stderr.drain()
    for opened in (full, log, place):
        os.close(opened)
    assert path.read_text() == "before\n2 lines of the log were dropped here\nafter\n"
    assert stderr.num_dropped == 2


PROGRAM = """
import asyncio, sys, warnings, structlog
from outrider.server.process import run_process, signals
from outrider.server.settings import ProcessSettings, model_config
from outrider.telemetry.stderr import num_lines_dropped

class Settings(ProcessSettings):
    model_config = model_config("outrider.test")

class Unspeakable:
    def __repr__(self):
        raise RuntimeError

async def serve(settings):
    stop, log = signals(), structlog.get_logger()
    for number in range(20_000):
        log.info("line", number=number)
        if number < 10:
            print("a line of a library", file=sys.stderr)
            warnings.warn(f"a warning {number}")
            asyncio.get_running_loop().call_exception_handler({"message": "of a task"})
            sys.excepthook(ValueError, ValueError("of a thread"), None)
            log.info("line", value=Unspeakable())
    print("dropped", num_lines_dropped(), flush=True)
    await stop.wait()
    log.info("last")

run_process("test", Settings, lambda: serve)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_goes_on_and_ends_well_whatever_becomes_of_its_lines(kind: Kind) -> None:
    with bad_stderr(kind) as options, started([sys.executable, "-c", PROGRAM], **options) as process:
        assert process.stdout is not None
        word, num_dropped = process.stdout.readline().split()
        assert word == "dropped"
        # Nothing gets through except what fits into the pipe; a thread writes, and may be late.
        assert int(num_dropped) > 10_000
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""


@pytest.mark.slow
def test_an_error_that_ends_the_process_is_the_last_that_is_read() -> None:
    program = PROGRAM.replace("await stop.wait()", "raise SystemExit('error: the end')")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[-1]) == (1, "error: the end")
    numbers = [int(found[1]) for line in lines if (found := re.search(r"number=(\d+)", line))]
    assert numbers == sorted(numbers)
    missing = [int(found[1]) for line in lines if (found := re.search(r"log.lines_dropped .*num_lines=(\d+)", line))]
    assert len(numbers) + sum(missing) >= 20_000


@pytest.mark.slow
def test_what_libraries_in_c_write_waits_for_nobody_either() -> None:
    write = """with contextlib.suppress(BlockingIOError):
        while True: os.write(2, bytes(1 << 16))
    print("went on", flush=True)"""
    program = "import contextlib, os\n" + PROGRAM.replace("20_000", "1").replace('log.info("last")', write)
    with bad_stderr("unread") as options, started([sys.executable, "-c", program], **options) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "went on\n"
        assert process.wait(30) == 0
        assert os.get_blocking(options["stderr"])  # other users of the pipe write to it as before
