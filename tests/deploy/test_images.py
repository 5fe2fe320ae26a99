"""Images are pinned; ours come from one registry and have the names of the built images."""

from __future__ import annotations

import re

import pytest

from outrider.version import __version__
from tests.support.manifests import (
    SERVICES,
    Object,
    containers_of,
    main_container,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow

IMAGE = re.compile(r"(?P<name>[^:@]+(:\d+/[^:@]+)?)(:(?P<tag>[\w][\w.-]*))?(@(?P<digest>sha256:[0-9a-f]{64}))?")


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
