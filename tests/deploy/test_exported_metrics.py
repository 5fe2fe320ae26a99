"""Every metric of every service is one that Prometheus and its users understand."""

from __future__ import annotations

import re

import pytest

from tests.deploy.exported import TAKEN, exported, known
from tests.support.manifests import DEPLOY

SERVICES = ("verifier", "speculator", "datastore", "edge", "gateway")
OF_VLLM = "vllm:"
"""Prefix of the metrics from which clients of vLLM read the effect of speculation."""


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_metrics_have_descriptions_and_names_by_the_rules(service: str) -> None:
    for name, family in exported()[service].items():
        assert len(family.description) > 5, name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name.removeprefix(OF_VLLM))
        assert (family.kind == "counter") == name.endswith("_total"), name
        # Units are the base ones, and part of the names.
        assert not re.search(r"_(ms|milliseconds|us|microseconds|mb|megabytes|kb|percent)(_|$)", name), name
        if name.startswith("outrider_"):
            assert family.series, f"{name}: nothing is exported"
            labels = frozenset[str]().union(*family.series.values())
            assert not labels & TAKEN, name


@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_says_what_it_is_and_how_its_process_is(service: str) -> None:
    families = exported()[service]
    assert families["outrider_build_info"].values["component"] == {service}
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= families.keys()
    assert {"outrider_serving", "outrider_files_unusable"} <= families.keys()


@pytest.mark.slow
def test_a_name_means_the_same_in_all_services() -> None:
    seen: dict[str, tuple[str, str]] = {}
    for families in exported().values():
        for name, family in families.items():
            meaning = (family.kind, family.description)
            assert seen.setdefault(name, meaning) == meaning, name


@pytest.mark.slow
def test_the_readme_names_metrics_that_there_are() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    series = known().series.keys()
    named = set(re.findall(r"`(outrider_\w+)`", text))
    assert len(named) > 8
    assert [name for name in named if not any(each == name or each == f"{name}_count" for each in series)] == []
