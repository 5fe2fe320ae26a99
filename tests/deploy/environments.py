"""The settings that the services run with, from the environments of their containers."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from outrider.datastore.settings import DatastoreSettings
from outrider.edge.settings import EdgeSettings
from outrider.server.settings import ProcessSettings
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.settings import VerifierSettings
from outrider_gateway.settings import GatewaySettings
from tests.support.manifests import SERVICES, Object, environment_of, main_container

CLASSES: dict[str, type[ProcessSettings]] = {
    "verifier": VerifierSettings,
    "speculator": SpeculatorSettings,
    "datastore": DatastoreSettings,
    "edge": EdgeSettings,
    "gateway": GatewaySettings,
}
FROM_SECRETS = {"OUTRIDER_DATASTORE_REDIS_URL": "rediss://datastore:secret@redis:6379/0"}
"""Variables that a Secret may fill, and an example of its value."""


def settings_of(workload: Object, objects: list[Object]) -> Any:
    """The settings that a workload of ours runs with. Raises pydantic.ValidationError."""
    service = SERVICES[workload["metadata"]["name"]]
    found = environment_of(main_container(workload), objects)
    values = {name: FROM_SECRETS[name] if value is None else value for name, value in found.items() if is_ours(name)}
    bare = {name: value for name, value in os.environ.items() if not is_ours(name)}
    with mock.patch.dict(os.environ, bare | values, clear=True):
        return CLASSES[service]()


def is_ours(name: str) -> bool:
    """True if a variable is one of our settings."""
    return name.startswith("OUTRIDER_")
