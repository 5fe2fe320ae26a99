"""The blocking client equals the asyncio client, without asyncio."""

from __future__ import annotations

import inspect
import threading

import pytest

from outrider_client import BlockingClient, Client
from outrider_client.blocking import BlockingGeneration
from outrider_client.client import Generation
from outrider_client.errors import Cancelled
from tests.support.fake_verifier import FakeVerifier, until_cancelled


async def test_both_clients_give_the_same_chunks_and_result(verifier: FakeVerifier) -> None:
    async with Client(verifier.address) as client:
        generation = client.generate("hello", temperature=0, method="off")
        chunks = [piece async for piece in generation]
    with BlockingClient(verifier.address) as blocking:
        twin = blocking.generate("hello", temperature=0, method="off")
        assert list(twin) == chunks
    assert twin.result == generation.result
    assert verifier.requests[0] == verifier.requests[1]


@pytest.mark.parametrize(("ours", "theirs"), [(BlockingClient, Client), (BlockingGeneration, Generation)])
def test_both_have_the_same_methods_with_the_same_parameters(ours: type, theirs: type) -> None:
    def parameters(kind: type) -> dict[str, list[str]]:
        names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return {name.removeprefix("a"): list(inspect.signature(getattr(kind, name)).parameters) for name in names}

    assert parameters(ours) == parameters(theirs)


def test_leaving_the_block_cancels_the_call(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    with BlockingClient(verifier.address) as client:
        with client.generate("hello") as generation:
            next(generation)
            assert not verifier.ended.is_set()
        assert verifier.ended.wait(10)


def test_cancel_from_another_thread_ends_a_pending_read(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    with BlockingClient(verifier.address) as client:
        generation = client.generate("hello")
        next(generation)
        canceller = threading.Thread(target=generation.cancel)
        canceller.start()
        with pytest.raises(Cancelled):
            next(generation)
        canceller.join()
        assert generation.token_ids == (5, 6)


def test_the_blocking_client_says_when_a_generation_is_admitted(verifier: FakeVerifier) -> None:
    with BlockingClient(verifier.address) as client:
        expected = list(client.generate("hello"))
        generation = client.generate("hello")
        generation.started()
        assert generation.session_id == "s-1"
        assert list(generation) == expected


def test_closing_the_client_cancels_what_runs(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    client = BlockingClient(verifier.address)
    generation = client.generate("hello")
    next(generation)
    closer = threading.Thread(target=client.close)
    closer.start()
    with pytest.raises(Cancelled):
        next(generation)
    closer.join()
