"""Images are pinned; ours come from one registry and have the names of the built images."""

from __future__ import annotations

import re

import pytest

from outrider.version import __version__
from tests.support.manifests import (
    DEPLOY,
    SERVICES,
    Object,
    containers_of,
    main_container,
    named,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

IMAGE = re.compile(r"(?P<name>[^:@]+(:\d+/[^:@]+)?)(:(?P<tag>[\w][\w.-]*))?(@(?P<digest>sha256:[0-9a-f]{64}))?")
OURS = set(SERVICES.values())


def complaints_of_images(objects: list[Object]) -> list[str]:
    """Images that are not pinned; images of ours of several registries, with a wrong name or of another version."""
    complaints, registries = [], set()
    for each in workloads(objects):
        for container in containers_of(each):
            found = IMAGE.fullmatch(container["image"])
            if found is None or not (found["digest"] or found["tag"]) or found["tag"] == "latest":
                complaints.append(f"{title(each)}: {container['image']} is not pinned")
            if container.get("imagePullPolicy") == "Always":
                complaints.append(f"{title(each)}: {container['image']} is pulled again each time")
    for each in services_of_ours(objects):
        image = main_container(each)["image"]
        registry, _, name = image.partition("@")[0].rpartition("/")
        registries.add(registry)
        name, _, tag = name.partition(":")
        if name != SERVICES[each["metadata"]["name"]]:
            complaints.append(f"{title(each)}: runs {image}")
        if "@" not in image and tag.partition("-")[0] != __version__:
            complaints.append(f"{title(each)}: runs {image}, this is {__version__}")
    return complaints + ([f"registries of ours: {sorted(registries)}"] if len(registries) > 1 else [])


def test_images_are_pinned_and_ours(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_images(objects)) == ""


def test_the_dockerfile_builds_every_image_of_ours() -> None:
    stages = re.findall(r"^FROM .* AS (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.M | re.I)
    assert set(stages) >= OURS


@pytest.mark.parametrize(
    "image",
    [
        "outrider/verifier",
        "outrider/verifier:latest",
        "outrider/verifer:0.2.0",
        "elsewhere/verifier:0.2.0",
        "outrider/verifier:0.0.0",
        "outrider/verifier@sha256:12",
    ],
)
def test_a_planted_image_is_found(image: str, gpu: list[Object]) -> None:
    assert complaints_of_images(gpu) == []
    main_container(named(gpu, "Deployment", "target-verifier"))["image"] = image
    assert complaints_of_images(gpu)


@pytest.mark.parametrize(
    "image", ["registry:5000/a/verifier:1.0", "a/verifier@sha256:" + "0" * 64, "busybox:1.37-musl"]
)
def test_a_pinned_image_is_one(image: str) -> None:
    found = IMAGE.fullmatch(image)
    assert found is not None
    assert found["tag"] or found["digest"]
