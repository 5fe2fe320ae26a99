"""Sessions share a pool of keys and values that is too small for them, and every text is as if it ran alone."""

from __future__ import annotations

import asyncio

import pytest
from grpc.aio import insecure_channel
from pydantic import ValidationError

from outrider.core.blocks import PrefixScope
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider.verifier import generation
from outrider.verifier.settings import VerifierSettings
from outrider_client.client import Client
from outrider_client.errors import OutOfRange, ResourceExhausted
from outrider_client.requests import generate_request
from tests.support.crowded_pool import NUM_TOKENS, PROMPTS, crowded_model
from tests.support.services import RunningVerifier, running_verifier
from tests.support.waiting import until

LONG = "\n".join(f"value_{n} = compute({n}, scale={n * n})" for n in range(40))


async def text_of(client: Client, prompt: str, num_tokens: int = 120, method: str = "off") -> list[int]:
    done = await client.complete(prompt, max_tokens=num_tokens, ignore_eos=True, method=method, seed=5, temperature=0.8)
    return list(done.token_ids)


def state_of(verifier: RunningVerifier) -> dict[str, int]:
    state = verifier.engine.residency.state()
    return {"held": state.num_blocks["held"], "preemptions": state.num_preemptions, "found": state.num_found_tokens}


async def test_all_sessions_of_a_crowded_pool_finish_and_every_text_is_as_alone() -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        before = state_of(verifier)
        together = await asyncio.gather(*(text_of(client, prompt, 80) for prompt in PROMPTS))
        assert state_of(verifier)["preemptions"] > before["preemptions"]
        alone = [await text_of(client, prompt, 80) for prompt in PROMPTS]
        await until(lambda: state_of(verifier)["held"] == 0)
    assert together == alone


async def test_what_a_session_finds_of_itself_when_it_comes_in_again_counts_as_computed() -> None:
    prompts = [[9, *range(300 + 100 * n, 380 + 100 * n)] for n in range(6)]
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        before = state_of(verifier)
        done = await asyncio.gather(
            *(client.complete(prompt, max_tokens=120, ignore_eos=True, method="off") for prompt in prompts)
        )
        after = state_of(verifier)
        assert after["preemptions"] > before["preemptions"]
        assert after["found"] - before["found"] >= 64
    assert [result.num_cached_prompt_tokens for result in done] == [0] * 6


async def test_what_could_never_fit_is_refused_at_once() -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        with pytest.raises(OutOfRange, match=r"max_tokens must be at most \d+, got 700.*values 640"):
            await client.complete("def f(", max_tokens=700)
        with pytest.raises(OutOfRange, match="shorter than this server's pool of keys and values, 640 tokens"):
            await client.complete(LONG * 3, max_tokens=1)
        # A request without max_tokens gets all the room that there is.
        done = await client.complete([9, *range(300, 850)], ignore_eos=True)
        assert len(done.token_ids) + done.num_prompt_tokens == NUM_TOKENS


async def test_who_waits_too_long_for_room_is_told_when_to_come_back() -> None:
    crowd = running_verifier(model=crowded_model(), max_num_sessions=1, max_num_queued=1, queue_timeout_s=0.2)
    async with crowd as verifier, Client(verifier.address) as client:
        running = client.generate("def f(", max_tokens=600, ignore_eos=True)
        await anext(running)
        waiting = asyncio.create_task(client.complete("def g(", max_tokens=4, resume=False))
        await until(lambda: len(verifier.engine.residency.waiting) == 1)
        with pytest.raises(ResourceExhausted, match="has all 1 sessions in use, and 1 wait") as full:
            await client.complete("def h(", max_tokens=4, resume=False)
        with pytest.raises(ResourceExhausted, match="no room for this session") as late:
            await waiting
        assert full.value.retry_after_s == late.value.retry_after_s == 1.0
        await running.aclose()
        await until(lambda: not verifier.engine.num_sessions)  # later tests use the same pool


async def test_who_waits_comes_in_when_another_ends() -> None:
    crowd = running_verifier(model=crowded_model(), max_num_sessions=1, max_num_queued=2)
    async with crowd as verifier, Client(verifier.address) as client:
        texts = await asyncio.gather(*(text_of(client, prompt, 20) for prompt in PROMPTS[:3]))
        assert texts == [await text_of(client, prompt, 20) for prompt in PROMPTS[:3]]


async def test_who_waits_is_told_so_and_takes_no_server_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "NEWS_S", 0.02)
    crowd = running_verifier(model=crowded_model(), max_num_sessions=1, max_num_queued=2)
    async with crowd as verifier, Client(verifier.address) as client, insecure_channel(verifier.address) as channel:
        running = client.generate("def f(", max_tokens=600, ignore_eos=True)
        await anext(running)
        waiting = asyncio.create_task(client.complete("def g(", max_tokens=4, stall_timeout_s=0.3))
        request = generate_request("def h(", {"max_tokens": 4})
        events = []
        async for response in VerifierServiceStub(channel).Generate(request):
            events.append(response.WhichOneof("event"))
            if events.count("waiting") == 30:  # for twice as long as the client is patient
                await running.aclose()
        assert events[:30] == ["waiting"] * 30
        assert events[-1] == "finished"
        assert (await waiting).num_resumes == 0


async def test_the_next_turn_reads_only_what_is_new() -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        first = await client.complete(LONG[:900], seed=1, max_tokens=70, ignore_eos=True, method="off")
        before = state_of(verifier)["found"]
        longer = await client.complete(LONG[:900] + first.text + "\n# next\n", max_tokens=8, method="off")
        found = state_of(verifier)["found"] - before
        # All full blocks of the first turn, output included, except where tokens merge at the seam.
        assert found >= (first.num_prompt_tokens + 60) // 64 * 64 - 64
        assert found < longer.num_prompt_tokens


async def test_a_prompt_that_is_told_of_is_read_anew_and_found_by_others() -> None:
    async with running_verifier() as verifier, Client(verifier.address) as client:
        prompt = [9, *range(200, 400)]
        found = []
        for options in ({}, {"prompt_logprobs": 0}, {}):
            before = state_of(verifier)["found"]
            result = await client.complete(prompt, max_tokens=1, **options)
            found.append(state_of(verifier)["found"] - before)
            assert len(result.prompt_logprobs) == (len(prompt) - 1 if options else 0)
        assert found == [0, 0, 192]
        other = [10, *prompt[1:]]
        await client.complete(other, max_tokens=1, prompt_logprobs=0)
        before = state_of(verifier)["found"]
        await client.complete(other, max_tokens=1)
        assert state_of(verifier)["found"] - before == 192


async def test_who_comes_while_another_speaks_finds_its_prompt() -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        prompt = LONG[:600]
        async with client.generate(prompt, max_tokens=100, ignore_eos=True, method="off") as stream:
            await anext(aiter(stream))
            before = state_of(verifier)["found"]
            await text_of(client, prompt, num_tokens=1)
            assert state_of(verifier)["found"] - before >= 64


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"kv_cache_tokens": 511}, "--kv-cache-tokens must be 0 or at least 512, 8 blocks of --kv-block-size, got 511"),
        ({"kv_block_size": 0}, "greater than or equal to 64"),
        ({"kv_block_size": 100}, "multiple of 64"),
        ({"prefix_scope": "session"}, "'tenant', 'global' or 'off'"),
        ({"exact": "on"}, "'auto', 'off' or 'require'"),
        ({"queue_timeout_s": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_pool_are_refused(flags: dict[str, object], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        VerifierSettings.model_validate(flags)


def test_prefixes_are_found_by_their_own_tenant_unless_the_scope_says_otherwise() -> None:
    salts = {scope: [scope.salt(tenant) for tenant in (None, "a", "b", "a")] for scope in PrefixScope}
    own = salts[PrefixScope.TENANT]
    assert len(set(own)) == 3
    assert own[1] == own[3]
    assert len(set(salts[PrefixScope.GLOBAL])) == 1
    assert salts[PrefixScope.GLOBAL][0] not in own
    assert set(salts[PrefixScope.OFF]) == {None}
