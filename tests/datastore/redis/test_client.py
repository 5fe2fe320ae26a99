"""Redis as the datastore uses it: authentication, encryption, and the errors while it is away."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from outrider.datastore.redis.client import RedisClient
from outrider.datastore.types import StoreUnavailable
from outrider_cli.local.redis import LocalRedis, RedisFailed, free_port
from tests.support.datastores import hung, restart


@pytest.fixture
async def open_client() -> AsyncIterator[Callable[..., RedisClient]]:
    """Makes clients that are closed when the test is over."""
    async with AsyncExitStack() as stack:

        def open_client(url: str, lookup_timeout_s: float = 5.0, timeout_s: float = 5.0) -> RedisClient:
            client = RedisClient(url, lookup_timeout_s=lookup_timeout_s, timeout_s=timeout_s)
            stack.push_async_callback(client.close)
            return client

        yield open_client


async def test_many_commands_at_once_have_each_its_own_reply(open_client, redis_url):
    client = open_client(redis_url)
    calls = [client.call_all([("ECHO", f"{number}"), ("ECHO", b"x" * number)]) for number in range(100)]
    assert await asyncio.gather(*calls) == [[f"{number}".encode(), b"x" * number] for number in range(100)]


async def test_a_caller_who_gives_up_leaves_the_others_their_answers(open_client, redis_url):
    client = open_client(redis_url)
    given_up = asyncio.ensure_future(client.call("BLPOP", "nothing", 5))
    await client.call("ECHO", "a")
    given_up.cancel()
    assert await client.call("ECHO", "b") == b"b"


@pytest.mark.slow
async def test_lookups_fail_at_once_while_redis_hangs_and_work_after_it(open_client, own_redis):
    client = open_client(own_redis.url, lookup_timeout_s=0.02, timeout_s=0.1)
    await client.start()
    assert await client.look_up([("ECHO", "a")]) == [b"a"]
    with hung(own_redis):
        with pytest.raises(StoreUnavailable, match="in time"):
            await client.look_up([("ECHO", "a")])
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await client.look_up([("ECHO", "a")])
        assert time.monotonic() - began < 0.5
    async with asyncio.timeout(2):
        while not await answers(client):  # noqa: ASYNC110 - another process is awaited
            await asyncio.sleep(0.005)


async def answers(client: RedisClient) -> bool:
    try:
        return await client.look_up([("ECHO", "a")]) == [b"a"]
    except StoreUnavailable:
        return False


async def test_a_call_that_waits_when_redis_dies_fails(open_client, own_redis):
    client = open_client(own_redis.url, timeout_s=60.0)
    waiting = asyncio.ensure_future(client.call("BLPOP", "nothing", 0))
    await client.call("PING")
    own_redis.kill()
    with pytest.raises(StoreUnavailable):
        await waiting
    with pytest.raises(StoreUnavailable, match="Connect call failed"):
        await client.call("PING")


async def test_a_password_and_a_database_are_used_and_no_error_shows_it(open_client, own_redis):
    await open_client(own_redis.url).call("CONFIG", "SET", "requirepass", "secret")
    url = f"redis://:secret@127.0.0.1:{own_redis.port}/3"
    assert b"db=3" in await open_client(url).call("CLIENT", "INFO")
    with pytest.raises(StoreUnavailable, match=r"(?i)authentication"):
        await open_client(own_redis.url).call("PING")
    with pytest.raises(StoreUnavailable, match="invalid username-password") as caught:
        await open_client(url.replace("secret", "guess")).call("PING")
    assert "guess" not in str(caught.value)


async def test_a_unix_socket_will_do(open_client, own_redis, tmp_path):
    restart(own_redis, "--unixsocket", str(tmp_path / "socket"))
    client = open_client(f"unix://{tmp_path}/socket?db=2")
    assert b"db=2" in await client.call("CLIENT", "INFO")


@pytest.fixture
def certificate(tmp_path) -> Path:
    """For localhost; its key is key.pem next to it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return certificate


async def test_a_connection_may_be_encrypted(open_client, own_redis, certificate):
    port, key = free_port(), certificate.with_name("key.pem")
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(certificate)]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    restart_or_skip(own_redis, *options)
    url = f"rediss://localhost:{port}/0"
    assert await open_client(f"{url}?ssl_ca_certs={certificate}").call("PING")
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        await open_client(url).call("PING")


def restart_or_skip(redis: LocalRedis, *options: str) -> None:
    try:
        restart(redis, *options)
    except RedisFailed:
        pytest.skip("this server program was built without TLS")


def test_a_url_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="scheme"):
        RedisClient("http://localhost", lookup_timeout_s=1, timeout_s=1)
