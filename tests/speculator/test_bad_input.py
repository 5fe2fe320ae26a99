"""All errors of a verifier are refused by name; the speculator stays up, and nothing is left over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from outrider.speculator.session import DraftSession
from outrider.v1 import speculator_pb2, speculator_pb2_grpc, types_pb2
from tests.support.services import RunningSpeculator, running_speculator
from tests.support.speculator_requests import PROMPT, Code, Session, commit, opening, refusal


@pytest.fixture
async def speculator() -> AsyncIterator[RunningSpeculator]:
    async with running_speculator(max_num_sessions=1) as running:
        yield running


@pytest.fixture
async def stub(speculator: RunningSpeculator) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(speculator.address) as channel:
        yield speculator_pb2_grpc.SpeculatorServiceStub(channel)


BAD_OPENINGS = {
    "another tokenizer": ({"tokenizer_hash": "00ff"}, Code.FAILED_PRECONDITION, "got 00ff (the target)"),
    "no committed tokens": ({"committed_token_ids": []}, Code.INVALID_ARGUMENT, "open.committed_token_ids must hold"),
    "unknown token": (
        {"committed_token_ids": [5, 4096]},
        Code.INVALID_ARGUMENT,
        "open.committed_token_ids[1] must be in",
    ),
    "too long": ({"committed_token_ids": [5] * 4000}, Code.OUT_OF_RANGE, "leave no room in the draft model's context"),
    "prompt longer than all": ({"num_prompt_tokens": 11}, Code.INVALID_ARGUMENT, "open.num_prompt_tokens must be in"),
    "long name": ({"session_id": "x" * 257}, Code.INVALID_ARGUMENT, "open.session_id must be at most 256 characters"),
    "no seed": ({"sampling": types_pb2.SamplingParams()}, Code.INVALID_ARGUMENT, "open.sampling.seed must be set"),
    "method without a draft model": (
        {"speculation": types_pb2.SpeculationParams(method=types_pb2.METHOD_RETRIEVAL)},
        Code.UNIMPLEMENTED,
        "retrieval needs no speculator",
    ),
    "method that the verifier has not chosen yet": (
        {"speculation": types_pb2.SpeculationParams(method=types_pb2.METHOD_AUTO)},
        Code.UNIMPLEMENTED,
        "speculation.method auto: the verifier chooses",
    ),
    "parameters of another method": (
        {"speculation": types_pb2.SpeculationParams(method=types_pb2.METHOD_PEARL, card={"beam_width": 4})},
        Code.INVALID_ARGUMENT,
        "speculation.card must be unset for method pearl",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
async def test_a_bad_opening_is_refused_by_name(stub: Any, speculator: RunningSpeculator, name: str) -> None:
    changes, code, words = BAD_OPENINGS[name]
    got = await refusal(stub, opening(speculator, **changes))
    assert (got[0], words in got[1]) == (code, True), got
    assert await speculator.is_idle()


BAD_COMMITS = {
    "contradicts an earlier one": (
        [commit(10, [7]), commit(10, [8])],
        Code.INVALID_ARGUMENT,
        "commit.token_ids must repeat",
    ),
    "contradicts the prompt": ([commit(9, [7])], Code.INVALID_ARGUMENT, "commit.token_ids must repeat"),
    "leaves a gap": ([commit(11, [7])], Code.OUT_OF_RANGE, "commit.base_len must be at most 10"),
    "beyond the context": ([commit(10, [5] * 2039)], Code.OUT_OF_RANGE, "commit.token_ids must end within the draft"),
    "empty": ([commit(10, [])], Code.INVALID_ARGUMENT, "commit.token_ids must hold"),
    "unknown token": ([commit(10, [-5])], Code.INVALID_ARGUMENT, "commit.token_ids[0] must be in"),
}


@pytest.mark.parametrize("name", BAD_COMMITS)
async def test_a_bad_commit_is_refused_by_name(stub: Any, speculator: RunningSpeculator, name: str) -> None:
    requests, code, words = BAD_COMMITS[name]
    got = await refusal(stub, opening(speculator), *requests)
    assert (got[0], words in got[1]) == (code, True), got
    assert await speculator.is_idle()


def steering(**fields: Any) -> speculator_pb2.SessionRequest:
    return speculator_pb2.SessionRequest(number=1, steering=types_pb2.Steering(**fields))


BAD_STEERINGS = {
    "out of range": (
        {"method": types_pb2.METHOD_PEARL, "num_speculative_tokens": 0},
        Code.INVALID_ARGUMENT,
        "speculation.num_speculative_tokens must be in [1, 64], this server's limit, got 0",
    ),
    "method without a draft model": (
        {"method": types_pb2.METHOD_SPACELIKE},
        Code.UNIMPLEMENTED,
        "spacelike needs no speculator",
    ),
    "method that is not chosen": ({"method": types_pb2.METHOD_AUTO}, Code.UNIMPLEMENTED, "the verifier chooses"),
    "another rule": (
        {"method": types_pb2.METHOD_PEARL, "acceptance_rule": types_pb2.ACCEPTANCE_RULE_RATIO},
        Code.INVALID_ARGUMENT,
        "speculation.acceptance_rule must be 1, as the stream was opened, got 2",
    ),
    "another noise": (
        {"method": types_pb2.METHOD_PEARL, "shared_noise": False},
        Code.INVALID_ARGUMENT,
        "speculation.shared_noise must be True, as the stream was opened, got False",
    ),
}


@pytest.mark.parametrize("name", BAD_STEERINGS)
async def test_bad_steering_is_refused_by_name(stub: Any, speculator: RunningSpeculator, name: str) -> None:
    fields, code, words = BAD_STEERINGS[name]
    bad = steering(speculation=types_pb2.SpeculationParams(**fields))
    got = await refusal(stub, opening(speculator), bad)
    assert (got[0], words in got[1]) == (code, True), got
    assert await speculator.is_idle()


async def test_steering_that_says_little_leaves_the_rest_as_it_was_opened(
    stub: Any, speculator: RunningSpeculator
) -> None:
    call = Session(stub)
    unshared = types_pb2.SpeculationParams(
        method=types_pb2.METHOD_SPECULATIVE, num_speculative_tokens=4, shared_noise=False
    )
    await call.write(opening(speculator, speculation=unshared))
    await call.draft()
    await call.write(steering(forward_us=2_000_000, round_trip_us=400))  # the target can wait for a whole draft
    await call.write(steering(speculation=types_pb2.SpeculationParams(num_speculative_tokens=6)))
    await call.write(commit(10, [7]))
    draft = await call.draft()
    while draft.base_len == 10:  # two more nodes of the first tree
        draft = await call.draft()
    assert (draft.base_len, len(draft.token_ids)) == (11, 6)
    call.cancel()
    assert await speculator.is_idle()


async def test_a_paused_session_grows_nothing_until_it_is_told_how(stub: Any, speculator: RunningSpeculator) -> None:
    call = Session(stub)
    await call.write(opening(speculator))
    await call.draft()
    await call.write(steering(speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_OFF)))
    await call.write(commit(10, [7]))
    await call.write(commit(11, [8]))
    await call.write(steering(speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_SPECULATIVE)))
    assert (await call.draft()).base_len == 12
    call.cancel()
    assert await speculator.is_idle()


async def test_a_request_without_an_event_is_refused(stub: Any, speculator: RunningSpeculator) -> None:
    code, details = await refusal(stub, opening(speculator), speculator_pb2.SessionRequest(number=1))
    assert (code, details) == (
        Code.INVALID_ARGUMENT,
        "sessions.event must be commit, steering or close while the session goes on",
    )


async def test_bytes_that_are_no_message_end_the_stream(speculator: RunningSpeculator) -> None:
    async with grpc.aio.insecure_channel(speculator.address) as channel:
        call: Any = channel.stream_stream("/outrider.v1.SpeculatorService/Speculate")()
        await call.write(speculator_pb2.SpeculateRequest(sessions=[opening(speculator)]).SerializeToString())
        await call.write(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert "got 1 bytes that are none" in (caught.value.details() or "")
    assert await speculator.is_idle()


async def test_a_session_too_many_is_refused_and_the_first_one_lives(stub: Any, speculator: RunningSpeculator) -> None:
    call = Session(stub)
    await call.write(opening(speculator))
    assert len((await call.draft()).token_ids) == 4
    code, details = await refusal(stub, opening(speculator))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "all 1 sessions" in details
    await call.write(commit(10, [7]))
    assert (await call.draft()).base_len == 11
    await call.write(speculator_pb2.SessionRequest(number=1, close=speculator_pb2.SpeculateClose()))
    assert await speculator.is_idle()


async def test_a_repeated_commit_changes_nothing(stub: Any, speculator: RunningSpeculator) -> None:
    call = Session(stub)
    await call.write(opening(speculator))
    await call.draft()
    await call.write(commit(10, [7]))
    once = await call.draft()
    await call.write(commit(9, [PROMPT[9], 7]))
    await call.write(commit(11, [8]))
    draft = await call.draft()
    assert (once.base_len, draft.base_len) == (11, 12)
    call.cancel()
    assert await speculator.is_idle()


async def test_what_comes_in_for_one_session_ends_no_other(
    stub: Any, speculator: RunningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator.servicer, "_max_num_sessions", 2)
    monkeypatch.setattr(speculator.engine.residency, "_max_num_residents", 2)
    other, call = Session(stub), Session(stub)
    for each in (other, call):
        await each.write(opening(speculator))
        await each.draft()
    commit_tokens = DraftSession.commit

    def failing(session: DraftSession, token_ids: Sequence[int], acknowledged_node_id: int) -> None:
        if token_ids == (13,):
            raise ValueError("a bug")
        commit_tokens(session, token_ids, acknowledged_node_id)

    monkeypatch.setattr(DraftSession, "commit", failing)
    await call.write(commit(10, [13]))
    assert await call.end() == (Code.UNAVAILABLE, "the speculator lost this session")
    await other.write(commit(10, [7]))
    while (await other.draft()).base_len != 11:
        pass
    other.cancel()
    assert await speculator.is_idle()


async def test_a_speculator_that_drains_sends_its_callers_elsewhere_at_once(
    stub: Any, speculator: RunningSpeculator
) -> None:
    call = Session(stub)
    await call.write(opening(speculator))
    await call.draft()
    speculator.servicer.drain()
    async with asyncio.timeout(5):
        ended = await call.end()
    assert ended == (Code.UNAVAILABLE, "the speculator is draining")
    assert await refusal(stub, opening(speculator)) == (Code.UNAVAILABLE, "the speculator is draining")
    assert await speculator.is_idle()
