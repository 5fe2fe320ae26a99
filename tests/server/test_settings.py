"""Settings that depend on each other, or on the machine."""

from __future__ import annotations

import os

import pytest

from outrider.server.settings import ModelSettings, model_config, parse_settings


class Settings(ModelSettings):
    """Those of a service that runs a model."""

    model_config = model_config("test")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine that runs the tests may have one.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("arguments", "engine_cores", "service_cores"),
    [
        ([], set(), set()),
        (["--cpu", "1,2"], {1, 2}, {1, 2}),
        (["--engine-cpu", "0,3"], {0, 3}, {1, 2}),
        (["--cpu", "1,2", "--engine-cpu", "2"], {2}, {1}),
    ],
)
def test_the_service_leaves_the_engines_cores(
    arguments: list[str], engine_cores: set[int], service_cores: set[int]
) -> None:
    settings = parse_settings(Settings, arguments)
    assert (settings.engine_cores, settings.service_cores) == (engine_cores, service_cores)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine-cpu", "0,1,2,3"], "--engine-cpu must be some of the cores 0,1,2,3 and leave one of them"),
        (["--cpu", "1,2", "--engine-cpu", "3"], "--engine-cpu must be some of the cores 1,2 and leave one of them"),
        (["--engine-cpu", "7"], "--engine-cpu (or OUTRIDER_TEST_ENGINE_CPU): must be among the cores that this"),
        (["--cpu", "7"], "--cpu (or OUTRIDER_TEST_CPU): must be among the cores that this process may use, 0,1,2,3"),
        (["--engine-cpu", "0-1"], "--engine-cpu (or OUTRIDER_TEST_ENGINE_CPU): must be core numbers"),
    ],
)
def test_cores_that_cannot_be_had_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_settings(Settings, arguments)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_cores_are_refused_where_a_process_cannot_choose_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--cpu", "0"])
    assert "this system does not let a process choose its cores" in capsys.readouterr().err
