"""The dashboard queries only what the services export, and explains what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.exported import exported, known
from tests.deploy.promql import labels_of, names_in

FILE = Path(__file__).parents[2] / "deploy/components/monitoring/dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
UNITS = {"s", "bytes", "Bps", "percentunit", "short"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def titled(panel: dict[str, Any]) -> str:
    return str(panel["title"])


@pytest.mark.slow
@pytest.mark.parametrize("panel", PANELS, ids=titled)
def test_a_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = labels_of(target["expr"], known())
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert named <= labels, f"{target['legendFormat']}: labels are {sorted(labels)}"
        # The legend has the label that distinguishes the lines.
        if "__auto" not in target["legendFormat"]:
            assert labels <= named | {"le"}, target["expr"]


@pytest.mark.slow
def test_every_metric_of_ours_is_shown() -> None:
    shown = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
    families = {name: family for service in exported().values() for name, family in service.items()}
    missing = {
        name
        for name, family in families.items()
        if name.startswith("outrider_") and not shown & {name, *family.series.keys()}
    }
    # Metrics for single questions: they say little on a dashboard of everything.
    assert missing == {"outrider_datastore_rings", "outrider_edge_draft_model_ready"} | {
        f"outrider_edge_{name}"
        for name in (
            "inter_chunk_latency_seconds",
            "request_duration_seconds",
            "requests_running",
            "requests_waiting",
        )
    }


@pytest.mark.parametrize("panel", PANELS, ids=titled)
def test_a_panel_has_title_description_unit_and_data_source(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 20
    unit = panel["options"]["yAxis"]["unit"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        # Every series is restricted to the chosen namespaces and jobs.
        selectors = re.findall(r"[a-z_]+{([^}]*)}", target["expr"])
        assert selectors
        assert all('namespace=~"$namespace", job=~"$job"' in selector for selector in selectors)


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.slow
def test_variables_are_filled_from_what_is_exported() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "job"]
    for name in ("namespace", "job"):
        query = variables[name]["query"]["query"]
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label == name
        assert label in labels_of(series, known())
        # "All" also finds what was scraped outside of a cluster, without a namespace.
        assert variables[name]["allValue"] == ".*"
