"""Everything that the documents of deploy/ name exists; every alert has a section that says what to do."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

from outrider.version import __version__
from tests.support.manifests import (
    DEPLOY,
    SERVICES,
    Object,
    components,
    containers_of,
    environment_of,
    gpu_with,
    kustomized,
    labels_of,
    main_container,
    named,
    of_kind,
    overlays,
    parsed,
    pod_of,
    rendered,
    services_of_ours,
)

pytestmark = pytest.mark.slow

DOCUMENTS = sorted(DEPLOY.rglob("*.md"))
PATH = re.compile(r"\b(?:deploy|base|components|overlays)/[\w./-]*\w")


def headings(text: str) -> list[str]:
    """The headings of a Markdown text, outside of its code."""
    return re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def complaints_of_document(text: str, folder: Path) -> list[str]:
    """Missing paths and anchors that a document in a folder names."""
    complaints = []
    anchors = {anchor(heading) for heading in headings(text)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, fragment = target.partition("#")
        if "://" in target:
            continue
        if path and not (folder / path).exists():
            complaints.append(f"no file {target}")
        elif path and fragment:
            there = {anchor(heading) for heading in headings((folder / path).read_text(encoding="utf-8"))}
            complaints += [] if fragment in there else [f"no section {target}"]
        elif not path and fragment not in anchors:
            complaints.append(f"no section {target}")
    for path in PATH.findall(text):
        if path.removeprefix("deploy/") in SERVICES:
            continue  # kubectl's name of a Deployment
        roots = (DEPLOY.parent, DEPLOY, folder)
        complaints += [] if any((root / path).exists() for root in roots) else [f"no path {path}"]
    return complaints


def alerts(objects: list[Object]) -> dict[str, Object]:
    """The alerts of all PrometheusRules by their names."""
    rules = [rule for each in of_kind(objects, "PrometheusRule") for g in each["spec"]["groups"] for rule in g["rules"]]
    found = {rule["alert"]: rule for rule in rules if "alert" in rule}
    assert len(found) == sum("alert" in rule for rule in rules), "an alert has two rules"
    return found


def complaints_of_alerts(objects: list[Object], runbook: str) -> list[str]:
    """Alerts without a section of the runbook, a link to it, a severity or a summary."""
    sections, complaints = headings(runbook), []
    for name, rule in alerts(objects).items():
        annotations = rule.get("annotations", {})
        complaints += [] if name in sections else [f"{name} has no section in the runbook"]
        if not annotations.get("runbook", "").endswith(f"#{anchor(name)}"):
            complaints.append(f"{name} links to {annotations.get('runbook')}")
        if "severity" not in rule.get("labels", {}) or "summary" not in annotations:
            complaints.append(f"{name} lacks a severity or a summary")
    return complaints


def runbook_of(objects: list[Object]) -> str:
    """The document that the alerts link to, by its path below deploy/. Fails if there are several."""
    links = {rule["annotations"]["runbook"].partition("#")[0] for rule in alerts(objects).values()}
    (link,) = links
    return (DEPLOY / link.removeprefix("deploy/")).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_document_names_what_is_there(path: Path) -> None:
    assert complaints_of_document(path.read_text(encoding="utf-8"), path.parent) == []


def test_the_readme_names_every_overlay_and_component() -> None:
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    names = [*overlays(), *components()]
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", readme)] == []


def shown_in_the_readme() -> tuple[str, str, str]:
    """The overlay that the README shows, and its additions for one GPU, and for several speculators."""
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    overlay, one_gpu, several = (textwrap.dedent(each) for each in re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL))
    return overlay, one_gpu, several


def rendered_from(text: str, folder: Path) -> list[Object]:
    """The objects of a user's own overlay, which lies next to deploy/."""
    assert "../deploy/" in text
    here = os.path.relpath(DEPLOY, folder.resolve())  # kustomize takes no absolute paths
    (folder / "kustomization.yaml").write_text(text.replace("../deploy/", f"{here}/"), encoding="utf-8")
    return list(parsed(kustomized(folder)))


def test_the_overlay_that_the_readme_shows_renders(tmp_path: Path) -> None:
    objects = rendered_from(shown_in_the_readme()[0], tmp_path)
    (models,) = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].startswith("models-")]
    assert models["data"]["target-model"] == "meta-llama/Llama-3.1-8B-Instruct"
    images = [container["image"] for each in services_of_ours(objects) for container in containers_of(each)]
    assert len(images) == 6
    assert all(image.startswith("registry.example.com/outrider/") for image in images)


def test_the_one_gpu_that_the_readme_shows_is_that_of_one_image(tmp_path: Path) -> None:
    overlay, one_gpu, _ = shown_in_the_readme()
    objects = rendered_from(overlay + one_gpu, tmp_path)
    verifier = named(objects, "Deployment", "target-verifier")
    images = {container["image"] for each in (verifier, *of_kind(objects, "Job")) for container in containers_of(each)}
    assert images == {f"registry.example.com/outrider/verifier:{__version__}"}
    assert environment_of(main_container(verifier), objects)["OUTRIDER_VERIFIER_DRAFTER"] == "in-process"


def test_the_several_speculators_that_the_readme_shows_are_one_name_to_the_verifier(tmp_path: Path) -> None:
    overlay, _, several = shown_in_the_readme()
    objects = rendered_from(overlay + several, tmp_path)
    speculator = named(objects, "Deployment", "draft-speculator")
    assert speculator["spec"]["replicas"] == 2
    assert named(objects, "Deployment", "target-verifier")["spec"]["replicas"] == 1
    (claim,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod_of(speculator)["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert named(objects, "PersistentVolumeClaim", claim)["spec"]["accessModes"] == ["ReadWriteMany"]
    # Without a cluster address the name stands for every pod, and the verifier dials each.
    service = named(objects, "Service", "draft-speculator")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= labels_of(speculator).items()
    container = main_container(named(objects, "Deployment", "target-verifier"))
    assert environment_of(container, objects)["OUTRIDER_VERIFIER_SPECULATOR"] == "dns:///draft-speculator:50052"


def test_every_alert_has_a_section_of_the_runbook() -> None:
    objects = rendered(gpu_with("monitoring"))
    assert alerts(objects)
    assert "\n".join(complaints_of_alerts(objects, runbook_of(objects))) == ""


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    objects = rendered(gpu_with("monitoring"))
    told = [heading for heading in headings(runbook_of(objects)) if re.fullmatch(r"Outrider[A-Z]\w+", heading)]
    assert sorted(told) == sorted(alerts(objects))
