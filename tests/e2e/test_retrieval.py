"""Retrieval end to end: loaded and generated tokens are found again, only by those who may find them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from outrider.core.params import Source
from outrider.v1 import datastore_pb2, datastore_pb2_grpc
from outrider_cli.app import app
from outrider_cli.local.redis import LocalRedis, free_port, started_redis
from outrider_cli.local.stack import LocalStack, Service, StackConfig
from outrider_client.blocking import BlockingClient
from outrider_client.channel import open_blocking
from outrider_client.generation import Result
from tests.support.waiting import until_true

pytestmark = pytest.mark.slow

PROMPT = "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
NUM_TOKENS = 64
WIDER = {Source.SHARED, Source.RING}


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    with started_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def stack(own_redis: LocalRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        redis_url=own_redis.url,
        log_folder=tmp_path_factory.mktemp("logs"),
        verifier_arguments=("--tenant", "first"),
    )
    with LocalStack(config) as running:
        yield running


@pytest.fixture(scope="module")
def other_tenant(stack: LocalStack) -> Iterator[Service]:
    """A verifier of another tenant, on the same datastore."""
    assert stack.datastore is not None
    flags = ("--model", "demo/target", "--dtype", "float32", "--num-threads", "1", "--tenant", "second")
    flags += ("--datastore", stack.datastore.address)
    log, listen = stack.log_folder / "second.log", f"127.0.0.1:{free_port()}"
    service = Service("verifier", "outrider.verifier", flags, log, listen=listen)
    try:
        service.start()
        service.wait_serving()
        yield service
    finally:
        service.stop()


@pytest.fixture
def empty(own_redis: LocalRedis) -> Iterator[redis.Redis]:
    """The store of that datastore, without data of earlier tests."""
    connection = redis.Redis.from_url(own_redis.url)
    connection.flushdb()
    yield connection
    connection.close()


def generate(address: str, seed: int = 1, **options: object) -> Result:
    given = {"method": "retrieval", "temperature": 0.7, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    with BlockingClient(address) as client:
        return client.complete(PROMPT, seed=seed, **given)  # type: ignore[arg-type]


def accepted(result: Result) -> dict[Source, int]:
    return {Source(count.source): count.num_tokens for count in result.summary.accepted_by_source}


def ring_of(stack: LocalStack, tenant: str) -> int:
    """Tokens in a tenant's ring, as the datastore holds it."""
    assert stack.datastore is not None
    with open_blocking(stack.datastore.address, None) as channel:
        info = datastore_pb2_grpc.DatastoreServiceStub(channel).GetInfo(datastore_pb2.DatastoreServiceGetInfoRequest())
    return sum(ring.num_tokens for ring in info.rings if ring.tenant == tenant)


def load_prior(stack: LocalStack, said: Result) -> None:
    """Makes the prompt and its continuation the prior of all tenants."""
    assert stack.datastore is not None
    with BlockingClient(stack.address) as client:
        model, prompt = client.info().model, client.tokenize(PROMPT)
    scope = datastore_pb2.Scope(tokenizer_hash=model.tokenizer_hash)
    document = datastore_pb2.TokenSequence(token_ids=[*prompt, *said.token_ids])
    request = datastore_pb2.LoadPriorRequest(scope=scope, documents=[document])
    with open_blocking(stack.datastore.address, None) as channel:
        responses = list(datastore_pb2_grpc.DatastoreServiceStub(channel).LoadPrior(iter([request])))
    assert responses[-1].is_done


def test_a_session_leaves_nothing_behind(stack: LocalStack, empty: redis.Redis) -> None:
    generate(stack.address)
    until_true(lambda: not empty.keys("outrider:*"))


def test_a_tenant_finds_again_what_it_has_said_and_no_other_tenant_does(
    stack: LocalStack, other_tenant: Service, empty: redis.Redis
) -> None:
    first = generate(stack.address, retrieval_scope="tenant")
    until_true(lambda: empty.keys("*ring"))
    again = [generate(stack.address, retrieval_scope="tenant") for _ in range(3)][-1]
    assert again.token_ids == first.token_ids
    found = accepted(again)
    assert sum(found.get(source, 0) for source in WIDER) > NUM_TOKENS // 2
    assert again.summary.num_rounds < first.summary.num_rounds // 2
    for scope in ("session", "tenant", "global"):
        elsewhere = generate(other_tenant.address, retrieval_scope=scope, contribute=False)
        assert elsewhere.token_ids == first.token_ids
        assert not WIDER & accepted(elsewhere).keys()


def test_spacelike_repeats_its_tenants_text_in_few_rounds(
    stack: LocalStack, other_tenant: Service, empty: redis.Redis
) -> None:
    plain = generate(stack.address, method="off", seed=11)
    first = generate(stack.address, method="spacelike", seed=11)
    assert first.token_ids == plain.token_ids
    until_true(lambda: empty.keys("*ring"))
    again = [generate(stack.address, method="spacelike", seed=11) for _ in range(3)][-1]
    assert again.token_ids == plain.token_ids
    assert accepted(again).keys() == {Source.RING}
    assert again.summary.num_rounds < first.summary.num_rounds // 4
    for scope in ("tenant", "global"):
        elsewhere = generate(other_tenant.address, method="spacelike", seed=11, retrieval_scope=scope, contribute=False)
        assert elsewhere.token_ids == plain.token_ids
        assert not accepted(elsewhere)


def test_double_has_a_tail_from_the_prior_and_the_targets_text(stack: LocalStack, empty: redis.Redis) -> None:
    plain = generate(stack.address, method="off", temperature=0)
    load_prior(stack, plain)

    def double(**params: object) -> Result:
        result = generate(stack.address, method="double", temperature=0, double=params)
        assert result.token_ids == plain.token_ids
        return result

    until_true(lambda: Source.PRIOR in accepted(double(max_match_len=8, max_phrase_len=1)))
    short = {"num_speculative_tokens": 2, "lookahead": 2}
    behind_drafts = generate(
        stack.address, method="double", temperature=0, double={"draft_retrieval": False, "max_match_len": 8}, **short
    )
    assert behind_drafts.token_ids == plain.token_ids
    assert behind_drafts.summary.num_tail_tokens > 0, "behind drafts, not in their place alone"
    for ablation in ({"target_retrieval": False}, {"tiers": ["dynamic", "rejected"]}):
        assert Source.PRIOR not in accepted(double(**ablation))
    assert accepted(double(target_retrieval=False)).keys() == {Source.DRAFT}
    assert Source.DRAFT in accepted(double(serial=True))


def test_who_does_not_contribute_is_not_found(stack: LocalStack, empty: redis.Redis) -> None:
    generate(stack.address, retrieval_scope="tenant", contribute=False)
    until_true(lambda: not empty.keys("*:s:*"))
    assert not empty.keys("outrider:*shared")
    assert not empty.keys("outrider:*ring")


def test_all_tenants_find_what_was_contributed_to_all(
    stack: LocalStack, other_tenant: Service, empty: redis.Redis
) -> None:
    first = generate(stack.address, retrieval_scope="global", seed=5)
    until_true(lambda: empty.keys("*g:ring"))
    again = [generate(other_tenant.address, retrieval_scope="global", seed=5) for _ in range(3)][-1]
    assert again.token_ids == first.token_ids
    found = accepted(again)
    assert sum(found.get(source, 0) for source in WIDER) > NUM_TOKENS // 2


def test_a_prior_is_built_loaded_used_listed_and_deleted(stack: LocalStack, empty: redis.Redis, tmp_path: Path) -> None:
    texts, prior = tmp_path / "texts.jsonl", tmp_path / "prior.bin"
    texts.write_text(json.dumps({"category": "code", "prompt": PROMPT}) + "\n")
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(app, ["prior", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    amount = ("--rounds", "2", "--max-tokens", "48")
    run("build", "--from", str(texts), *amount, "--out", str(prior), "--address", stack.address)
    run("load", str(prior), "--address", stack.address)
    [corpus] = json.loads(run("list", "--address", stack.address, "--json"))
    assert corpus["corpus"] == "default"
    # The prior's first round was greedy, and so is this.
    until_true(lambda: accepted(generate(stack.address, temperature=0, max_tokens=40)).get(Source.PRIOR, 0) > 20)
    draft_side = generate(stack.address, temperature=0, max_tokens=40, method="pearl", retrieval=True)
    assert draft_side.token_ids == generate(stack.address, temperature=0, max_tokens=40, method="off").token_ids
    run("delete", "default", "--address", stack.address)
    until_true(lambda: Source.PRIOR not in accepted(generate(stack.address, temperature=0, max_tokens=40)))
    assert json.loads(run("list", "--address", stack.address, "--json")) == []


def hits_of(stack: LocalStack, tier: Source) -> tuple[int, int, int]:
    """Returns how many contexts the datastore has looked up, how many it knew, and how many this tier answered."""
    assert stack.datastore is not None
    with open_blocking(stack.datastore.address, None) as channel:
        info = datastore_pb2_grpc.DatastoreServiceStub(channel).GetInfo(datastore_pb2.DatastoreServiceGetInfoRequest())
    return info.num_lookups, info.num_hits, sum(each.num_hits for each in info.tiers if each.tier == tier.value)


REMOTE_SESSIONS = {
    Source.PRIOR: {"method": "retrieval"},
    Source.DYNAMIC: {"method": "retrieval"},
    # Drafts that do not know the target's noise are often refused, and sometimes what it says later.
    Source.REJECTED: {"method": "speculative", "retrieval": True, "shared_noise": False},
}


@pytest.mark.parametrize("tier", REMOTE_SESSIONS, ids=lambda tier: tier.name)
def test_a_remote_session_keeps_what_the_datastore_finds(stack: LocalStack, empty: redis.Redis, tier: Source) -> None:
    options = REMOTE_SESSIONS[tier] | {"retrieval_remote": True, "sources": [tier]}
    length = 160
    before = hits_of(stack, tier)
    for seed in range(30):
        plain = generate(stack.address, seed, method="off", max_tokens=length)
        if tier is Source.PRIOR:
            load_prior(stack, plain)
        result = generate(stack.address, seed, max_tokens=length, **options)
        assert result.token_ids == plain.token_ids
        kept = accepted(result)
        assert kept.keys() <= {tier, Source.DRAFT}
        if tier in kept:
            break
    assert kept[tier] > 0
    assert all(later > earlier for earlier, later in zip(before, hits_of(stack, tier), strict=True))


def test_a_remote_session_has_no_copies_to_fall_back_on_and_waits_for_nothing(
    stack: LocalStack, empty: redis.Redis
) -> None:
    assert stack.datastore is not None
    length = 2 * NUM_TOKENS
    options = {"temperature": 0, "max_tokens": length, "sources": [Source.DYNAMIC]}
    plain = generate(stack.address, method="off", temperature=0, max_tokens=length)
    os.kill(stack.datastore.pid, signal.SIGSTOP)
    try:
        assert accepted(generate(stack.address, **options)).keys() == {Source.DYNAMIC}
        started = time.monotonic()
        remote = generate(stack.address, retrieval_remote=True, **options)
        assert time.monotonic() - started < 10
    finally:
        os.kill(stack.datastore.pid, signal.SIGCONT)
    assert remote.token_ids == plain.token_ids
    assert not accepted(remote)


def test_a_hanging_datastore_delays_nothing_and_gets_all_later(stack: LocalStack, empty: redis.Redis) -> None:
    assert stack.datastore is not None
    plain = generate(stack.address, seed=9, method="off")
    os.kill(stack.datastore.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        hurt = generate(stack.address, seed=9, retrieval_scope="tenant")
        assert time.monotonic() - started < 10
        assert hurt.token_ids == plain.token_ids
    finally:
        os.kill(stack.datastore.pid, signal.SIGCONT)
    num_tokens = hurt.num_prompt_tokens + NUM_TOKENS
    until_true(lambda: [entry[1] for entry in empty.xrange(empty.keys("*ring")[0])] if empty.keys("*ring") else None)
    [(_, entry)] = empty.xrange(empty.keys("*ring")[0])
    assert len(entry[b"tokens"]) == 4 * num_tokens
    with BlockingClient(stack.address) as client:
        assert client.info().datastore.num_shed_tokens == 0


def test_a_restarted_datastore_gets_the_rest_of_the_session(stack: LocalStack, empty: redis.Redis) -> None:
    assert stack.datastore is not None
    with BlockingClient(stack.address) as client:
        generation = client.generate(
            PROMPT, seed=3, method="retrieval", retrieval_scope="tenant", max_tokens=200, ignore_eos=True
        )
        next(iter(generation))
        stack.datastore.restart()
        for _ in generation:
            pass
        result = generation.result
    until_true(lambda: empty.keys("*ring"))
    [(_, entry)] = empty.xrange(empty.keys("*ring")[0])
    assert len(entry[b"tokens"]) == 4 * (result.num_prompt_tokens + 200)
