"""The rendered objects that every check looks at."""

from __future__ import annotations

import pytest

from tests.support.manifests import Object, Variant, rendered, variants


@pytest.fixture(params=list(variants()), ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Every variant in turn."""
    found: Variant = request.param
    return found


@pytest.fixture
def objects(variant: Variant) -> list[Object]:
    """The objects of every variant in turn."""
    return rendered(variant)


@pytest.fixture
def gpu() -> list[Object]:
    """The objects of overlay `gpu`, to plant an error in."""
    return rendered(Variant("gpu"))
