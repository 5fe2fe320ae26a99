"""One connection to Redis."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import hiredis
import pytest

from outrider.datastore.link import CommandFailed, Endpoint, LinkLate, LinkLost
from outrider_client.local_redis import LocalRedis, RedisFailed, free_port

from .conftest import hung, restart


async def test_replies_come_in_order_however_many_commands_are_under_way(redis_url):
    link = await Endpoint(redis_url).connect(5.0)
    calls = [link.send([("ECHO", f"{number}"), ("ECHO", b"x" * number)], 5.0) for number in range(200)]
    assert await asyncio.gather(*calls) == [[f"{number}".encode(), b"x" * number] for number in range(200)]
    link.close()


async def test_a_refused_command_does_not_take_the_others_with_it(redis_url):
    link = await Endpoint(redis_url).connect(5.0)
    first, refused, last = await link.send([("ECHO", "a"), ("NONSENSE",), ("ECHO", "b")], 5.0)
    assert (first, last) == (b"a", b"b")
    assert isinstance(refused, hiredis.ReplyError)
    with pytest.raises(CommandFailed, match="unknown command"):
        await link.call(5.0, "NONSENSE")
    assert await link.send([], 5.0) == []
    link.close()


async def test_a_caller_who_gives_up_leaves_the_answers_of_others_in_order(redis_url):
    link = await Endpoint(redis_url).connect(5.0)
    given_up = link.send([("ECHO", "a")], 5.0)
    given_up.cancel()
    assert await link.call(5.0, "ECHO", "b") == b"b"
    link.close()


@pytest.mark.slow
async def test_a_late_answer_fails_its_call_alone_and_shows_that_redis_is_back(own_redis):
    link = await Endpoint(own_redis.url).connect(5.0, give_up_s=10.0)
    with hung(own_redis):
        patient = link.send([("ECHO", "b")], 5.0)
        began = time.monotonic()
        with pytest.raises(LinkLate):
            await link.call(0.02, "ECHO", "a")
        assert time.monotonic() - began < 1
        assert link.is_prompt  # the oldest call has time
    assert await patient == [b"b"]
    with hung(own_redis):
        with pytest.raises(LinkLate):
            await link.call(0.02, "ECHO", "a")
        assert not link.is_prompt
    assert await link.call(5.0, "ECHO", "c") == b"c"
    assert link.is_prompt
    link.close()


@pytest.mark.slow
async def test_a_redis_that_does_not_answer_is_given_up(own_redis):
    link = await Endpoint(own_redis.url).connect(5.0, give_up_s=0.1)
    with hung(own_redis):
        with pytest.raises(LinkLate):
            await link.call(0.02, "PING")
        async with asyncio.timeout(5):
            await link.lost.wait()
        with pytest.raises(LinkLost, match="does not answer"):
            await link.call(0.02, "PING")
        with pytest.raises(LinkLost, match="Timeout"):
            await Endpoint(own_redis.url).connect(0.1)


async def test_whoever_waits_when_the_connection_ends_is_told(own_redis):
    link = await Endpoint(own_redis.url).connect(5.0)
    waiting = link.send([("BLPOP", "nothing", 0)], 60.0)
    own_redis.kill()
    with pytest.raises(LinkLost):
        await waiting
    with pytest.raises(LinkLost, match="Connect call failed"):
        await Endpoint(own_redis.url).connect(5.0)


async def test_a_password_and_a_database_are_used_and_the_password_is_not_told(own_redis):
    opened = await Endpoint(own_redis.url).connect(5.0)
    await opened.call(5.0, "CONFIG", "SET", "requirepass", "secret")
    opened.close()
    url = f"redis://:secret@127.0.0.1:{own_redis.port}/3"
    link = await Endpoint(url).connect(5.0)
    assert b"db=3" in await link.call(5.0, "CLIENT", "INFO")
    link.close()
    with pytest.raises(LinkLost, match="NOAUTH"):
        await Endpoint(own_redis.url).connect(5.0)
    with pytest.raises(LinkLost, match="WRONGPASS") as caught:
        await Endpoint(url.replace("secret", "guess")).connect(5.0)
    assert "guess" not in str(caught.value)
    assert str(Endpoint(url)) == f"127.0.0.1:{own_redis.port}"


async def test_a_unix_socket_will_do(own_redis, tmp_path):
    restart(own_redis, "--unixsocket", str(tmp_path / "socket"))
    endpoint = Endpoint(f"unix://{tmp_path}/socket?db=2")
    link = await endpoint.connect(5.0)
    assert b"db=2" in await link.call(5.0, "CLIENT", "INFO")
    assert str(endpoint) == f"{tmp_path}/socket"
    link.close()


@pytest.fixture
def certificate(tmp_path) -> Path:
    """For localhost; its key is key.pem beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return certificate


async def test_a_connection_may_be_encrypted(own_redis, certificate):
    port, key = free_port(), certificate.with_name("key.pem")
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(certificate)]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    restart_or_skip(own_redis, *options)
    url = f"rediss://localhost:{port}/0"
    link = await Endpoint(f"{url}?ssl_ca_certs={certificate}").connect(5.0)
    assert await link.call(5.0, "PING") == b"PONG"
    link.close()
    with pytest.raises(LinkLost, match="certificate"):
        await Endpoint(url).connect(5.0)
    link = await Endpoint(f"{url}?ssl_cert_reqs=none").connect(5.0)
    link.close()


def restart_or_skip(redis: LocalRedis, *options: str) -> None:
    try:
        restart(redis, *options)
    except RedisFailed:
        pytest.skip("this server program was built without TLS")


def test_a_url_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="scheme"):
        Endpoint("http://localhost")
