"""The process around a service of any protocol: settings, logs, cores, traces, signals, exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from outrider.security.watched_files import UnusableFile
from outrider.server.export import start_traces
from outrider.server.settings import Settings, parse_settings
from outrider.telemetry.logs import configure_logs
from outrider.telemetry.stderr import drain_stderr, replace_stderr

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT, as in shells."""
SWITCH_INTERVAL_S = 0.0005
"""Seconds for which a thread that computes in Python keeps the GIL while another one wants it. An engine gives the GIL
up at each of a forward's launches, and would wait for it up to 5 ms, Python's default, while the event loop writes
messages."""


SPIN_COUNT = "1000"
"""Turns for which a thread of OpenMP spins while it waits, some 50 microseconds. Waking a thread takes about as long,
so that a wait costs at most twice the minimum. The default is hundreds of times as long: a thread that waits for one
that another program keeps from running takes the core from others meanwhile."""


def say_step(words: str) -> None:
    """Prints on stdout what a service does while it gets ready, which may take minutes."""
    print(f"step: {words}", flush=True)


def run_process(
    name: str, settings_class: type[Settings], load: Callable[[], Callable[[Settings], Awaitable[None]]]
) -> None:
    """Reads the settings from the command line, and runs the serving function until it ends.

    Args:
        name: Short name of the service, in its logs and traces.
        settings_class: Flags and variables of the service.
        load: Imports the service, and returns the function that serves. Called after the settings are read: torch takes
            seconds to import, and a wrong flag is reported before that.
    """
    replace_stderr()
    settings = parse_settings(settings_class)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Checked before the imports, which take seconds, and with a short message: gRPC would log a whole page.
    for flag, address in {"--listen": settings.listen, "--metrics-listen": settings.metrics_listen}.items():
        if is_taken(address):
            raise SystemExit(f"error: {flag}: port {address.rpartition(':')[2]} is in use, got {address!r}")
    threads = set(threading.enumerate())
    configure_logs(settings.log_level, settings.log_format, name)
    pin(settings.cores)
    # libgomp reads it when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    traces = start_traces(f"outrider-{name}", settings)
    try:
        asyncio.run(_serve(load(), settings))
    except KeyboardInterrupt:
        # SIGINT came before `signals` had replaced Python's own handler, mostly while `load` imports.
        raise SystemExit(INTERRUPTED) from None
    finally:
        if traces is not None:
            traces.stop()
    # A model that still loads, or a download that is still retried, is no longer needed. Python would wait for its
    # thread, which cannot be ended.
    if any(not thread.daemon for thread in set(threading.enumerate()) - threads):
        with suppress(OSError):
            print(end="", flush=True)
        drain_stderr()
        os._exit(0)


def announce(line: str) -> None:
    """Prints a line on stdout for the process that has started this one, which may be gone."""
    try:
        print(line, flush=True)
    except OSError:
        # At exit Python would flush the rest, fail again, and report an error.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_taken(address: str) -> bool:
    """Returns True if an address of this machine, HOST:PORT, is in use by a listener."""
    host, _, port = address.rpartition(":")
    if port in ("", "0"):
        return False
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False  # no address of this machine: the server's own message says why
    return any(_is_in_use(family, place) for family, *_, place in found)


def _is_in_use(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family) as listener:
        # As servers do: connections of an earlier server in TIME_WAIT are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


async def _serve(serve: Callable[[Settings], Awaitable[None]], settings: Settings) -> None:
    try:
        await serve(settings)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error


def pin(cores: set[int]) -> None:
    """Runs this process on these cores only; an empty set means on any."""
    # Linux sets the calling thread only. Later threads inherit it, so this comes before torch starts any.
    if cores:
        os.sched_setaffinity(0, cores)


def signals() -> asyncio.Event:
    """Returns an event that is set whenever SIGTERM or SIGINT arrives."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Replaces the handler of asyncio.run, which would cancel the main task on SIGINT instead of letting it drain.
        loop.add_signal_handler(number, event.set)
    return event


def freeze_gc() -> None:
    """Exempts everything that is loaded by now from garbage collection, which would scan it repeatedly."""
    # Frozen garbage is never freed, so it is collected first.
    gc.collect()
    gc.freeze()
