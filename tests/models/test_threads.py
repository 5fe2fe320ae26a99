"""A model loads in its own thread, which ends, and in the context of its caller."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from outrider.models.threads import in_own_thread
from tests.support.waiting import until

service: ContextVar[str] = ContextVar("service", default="none")


async def test_it_runs_in_a_thread_that_ends_and_in_the_callers_context() -> None:
    service.set("verifier")
    thread, name = await in_own_thread(lambda: (threading.current_thread(), service.get()))
    assert thread is not threading.current_thread()
    assert name == "verifier"
    await until(lambda: not thread.is_alive())


async def test_what_it_raises_is_raised() -> None:
    def load() -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        await in_own_thread(load)
