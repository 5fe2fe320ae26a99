"""Several texts of one request: the failure of one ends them all, with that failure's own status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from outrider.server.choices import run_choices
from outrider.wire.errors import OutOfRange


@pytest.mark.parametrize("num_texts", [1, 3])
@pytest.mark.parametrize("error", [OutOfRange("too long"), grpc.aio.InternalError("the caller has gone")])
async def test_what_fails_is_told_as_it_is_and_ends_the_others(num_texts: int, error: Exception) -> None:
    ended: list[int] = []

    async def run(number: int, first: int | None, send: Callable[[str], Awaitable[None]]) -> None:
        await send("begun")
        if number == num_texts - 1:
            raise error
        try:
            await asyncio.Future()
        finally:
            ended.append(number)

    async def send(event: str, number: int) -> None:
        assert event == "begun"

    with pytest.raises(type(error)) as raised:
        await run_choices(range(num_texts), run, send, lambda event: True)
    assert raised.value is error
    assert sorted(ended) == list(range(num_texts - 1))
