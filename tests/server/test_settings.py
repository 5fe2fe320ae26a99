"""Settings that depend on the machine."""

from __future__ import annotations

import os

import pytest

from outrider.edge.settings import EdgeSettings
from outrider.server.settings import ModelSettings, ProcessSettings, ServiceSettings, model_config, parse_settings
from outrider.speculator.settings import DraftModelSettings, SpeculatorSettings
from outrider_gateway.settings import GatewaySettings


class Settings(ServiceSettings):
    """Settings that every service has."""

    model_config = model_config("outrider.test")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine that runs the tests may have one.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.parametrize(("arguments", "cores"), [([], set()), (["--cpu", "1,3"], {1, 3})])
def test_cores_are_a_list(arguments: list[str], cores: set[int]) -> None:
    assert parse_settings(Settings, arguments).cores == cores


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("cpu", "7", "must be among the cores that this process may use, 0,1,2,3"),
        ("cpu", "first", "must be core numbers"),
        ("listen", "nowhere", "must be HOST:PORT with a port of 0 to 65535"),
    ],
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_wrong_value_is_refused_with_its_flag_and_its_variable(
    flag: str,
    value: str,
    rule: str,
    by_variable: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variable = f"OUTRIDER_TEST_{flag.upper()}"
    if by_variable:
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as raised:
        parse_settings(Settings, [] if by_variable else [f"--{flag}", value])
    assert raised.value.code == 2
    assert f"--{flag} (or {variable}): {rule}" in capsys.readouterr().err


def test_cores_are_refused_where_a_process_cannot_choose_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--cpu", "0"])
    assert "this system does not let a process choose its cores" in capsys.readouterr().err


def test_a_misspelt_variable_is_warned_of_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_TEST_LOG_LEVL", "debug")
    monkeypatch.setenv("OUTRIDER_TESTS_LOG_LEVEL", "debug")
    monkeypatch.setenv("OUTRIDER_TEST_NOTHING_LIKE_IT", "1")
    for name in ("OUTRIDER_TEST_CPU", "OUTRIDER_ADDRESS", "OUTRIDER_OTHER_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    assert parse_settings(Settings, []).log_level == "info"
    meant = "is no variable of this service: did you mean OUTRIDER_TEST_LOG_LEVEL?"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: OUTRIDER_TESTS_LOG_LEVEL {meant}",
        f"warning: OUTRIDER_TEST_LOG_LEVL {meant}",
        "warning: OUTRIDER_TEST_NOTHING_LIKE_IT is no variable of this service: --help lists the flags, each of which "
        "is one",
    ]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--log-levl", "debug"], "there is no flag --log-levl: did you mean --log-level?"),
        (["--log-levl=debug"], "there is no flag --log-levl: did you mean --log-level?"),
        (["--no-insecur"], "there is no flag --no-insecur: did you mean --no-insecure?"),
        (["--nothing-like-it"], "there is no flag --nothing-like-it: --help-all lists all"),
        (["--listen"], "argument --listen: expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_misspelt_flag_is_told_with_what_was_meant(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_settings(Settings, flags)
    assert capsys.readouterr().err == f"error: {complaint}\n"


def test_help_names_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Every flag is a variable, too: --log-level is OUTRIDER_TEST_LOG_LEVEL." in words


class OfAModel(ModelSettings):
    """Settings of a service with a model."""

    model_config = model_config("outrider.test")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3", "xpu:0", "mps"])
def test_a_device_is_one_of_torchs(device: str) -> None:
    assert parse_settings(OfAModel, ["--device", device]).device == device


@pytest.mark.parametrize("service", [SpeculatorSettings, EdgeSettings])
@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [([], "float32"), (["--device", "cuda:0"], "auto"), (["--device", "cuda:0", "--dtype", "float32"], "float32")],
)
def test_the_numbers_of_a_draft_model_are_those_that_suit_its_device_unless_they_are_named(
    service: type[DraftModelSettings], arguments: list[str], dtype: str
) -> None:
    upstream = ["--upstream", "127.0.0.1:1"] if service is EdgeSettings else []
    assert parse_settings(service, [*arguments, *upstream]).dtype == dtype


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cpu:0", ""])
def test_another_device_is_refused_before_torch_is_imported(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_settings(OfAModel, [f"--device={device}"])
    assert raised.value.code == 2
    rule = "must be cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps"
    assert f"--device (or OUTRIDER_TEST_DEVICE): {rule}, got {device!r}" in capsys.readouterr().err


@pytest.mark.parametrize("service", [EdgeSettings, GatewaySettings])
@pytest.mark.parametrize("upstream", ["cloud:0", "a:1,,b:2"])
def test_whoever_dials_verifiers_says_in_the_same_words_what_an_address_is(
    service: type[ProcessSettings], upstream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(service, ["--upstream", upstream, "--peer-insecure"])
    rule = "must be HOST:PORT with a port of 1 to 65535, or several with commas between"
    assert f"--upstream (or {service.model_config['env_prefix']}UPSTREAM): {rule}" in capsys.readouterr().err
