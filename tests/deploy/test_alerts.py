"""Alerts query only what the services export, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.exported import known
from tests.deploy.promql import Known, labels_of, names_in
from tests.support.manifests import missing

FILE = Path(__file__).parents[2] / "deploy/components/monitoring/rules.yaml"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
RESOURCE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
GROUPS: list[dict[str, Any]] = RESOURCE["spec"]["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]


def named(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


def known_with_recorded() -> Known:
    """What may be queried, including the results of recording rules."""
    exported = known()
    series: Mapping[str, frozenset[str]] = exported.series
    for rule in RULES:
        if "record" in rule:
            series = {**series, rule["record"]: labels_of(rule["expr"], Known(series, exported.values))}
    return Known(series, exported.values)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_rule_asks_for_what_is_exported_and_tells_labels_that_it_has(rule: dict[str, Any]) -> None:
    labels = labels_of(rule["expr"], known_with_recorded())
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule.get("annotations", {}).values())))
    assert told <= labels, f"{named(rule)} has {sorted(labels)}"


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        missing("promtool is not installed; on Debian it is in the package prometheus")
    return found


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The groups as a file of Prometheus itself."""
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": GROUPS}), encoding="utf-8")
    return file


def test_prometheus_takes_them(promtool: str, rules: Path) -> None:
    checked = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_they_fire_when_they_should_and_not_before(promtool: str, rules: Path) -> None:
    copy = rules.with_name(UNIT_TESTS.name)
    shutil.copy(UNIT_TESTS, copy)
    tested = subprocess.run([promtool, "test", "rules", copy], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_is_tested(rules: Path) -> None:
    cases = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
    checks = [check for case in cases for check in case.get("alert_rule_test", [])]
    fired = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert fired == silent == {alert["alert"] for alert in ALERTS}


@pytest.mark.slow
def test_the_series_of_these_tests_are_exported_ones() -> None:
    exported = known()
    cases = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
    for case in cases:
        for given in case["input_series"]:
            assert names_in(given["series"])
            labels_of(given["series"], exported)
