"""--help of the services: in 80 columns, the most important flags first."""

from __future__ import annotations

import re

import pytest

from outrider.datastore.settings import DatastoreSettings
from outrider.edge.settings import EdgeSettings
from outrider.server.settings import ProcessSettings, parse_settings
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.settings import VerifierSettings
from outrider_gateway.settings import GatewaySettings

SERVICES: list[type[ProcessSettings]] = [
    VerifierSettings,
    SpeculatorSettings,
    DatastoreSettings,
    EdgeSettings,
    GatewaySettings,
]


def helped(service: type[ProcessSettings], flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_settings(service, [flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("service", SERVICES)
def test_help_fits_80_columns_and_leaves_to_another_flag_what_few_need(
    service: type[ProcessSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    brief, whole = helped(service, "--help", capsys), helped(service, "--help-all", capsys)
    assert max(map(len, f"{brief}{whole}".splitlines())) <= 80
    flags = re.findall(r"^  (--[a-z0-9-]+)", whole, re.M)
    assert sorted(flags) == sorted(f"--{name.replace('_', '-')}" for name in service.model_fields)
    assert "--tls-cert" not in brief
    assert "--listen" in brief
    assert brief.index("First:") < brief.index("--listen") < brief.index("Its own:")
    assert helped(service, "-h", capsys) == brief
