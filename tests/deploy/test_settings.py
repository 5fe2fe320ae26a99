"""The environment of every container fits its settings class, with each variable once."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from outrider.verifier.settings import VerifierSettings
from tests.deploy.environments import CLASSES, FROM_SECRETS, is_ours, settings_of
from tests.support.manifests import (
    SERVICES,
    Object,
    Variant,
    containers_of,
    environment_of,
    gpu_with,
    main_container,
    named,
    num_gpus,
    rendered,
    services_of_ours,
    title,
    workloads,
)

pytestmark = pytest.mark.slow


def complaints_of_environments(objects: list[Object]) -> list[str]:
    """Variables given twice, or that no setting has; values that the settings class refuses."""
    complaints = []
    for each in workloads(objects):
        for container in containers_of(each):
            names = Counter(variable["name"] for variable in container.get("env", []))
            complaints += [f"{title(each)}: {name} is given twice" for name, count in names.items() if count > 1]
    for each in services_of_ours(objects):
        service = SERVICES[each["metadata"]["name"]]
        fields, prefix = CLASSES[service].model_fields, f"OUTRIDER_{service.upper()}_"
        for name, value in environment_of(main_container(each), objects).items():
            if is_ours(name) and name.removeprefix(prefix).lower() not in fields:
                complaints.append(f"{title(each)}: {name} is no setting")
            if is_ours(name) and value is None and name not in FROM_SECRETS:
                complaints.append(f"{title(each)}: {name} has no value that is known here")
        try:
            settings_of(each, objects)
        except (ValidationError, KeyError) as error:
            complaints.append(f"{title(each)}: {error}")
    return complaints


def complaints_of_devices(objects: list[Object]) -> list[str]:
    """Models whose settings name a GPU that their pod lacks, and the reverse."""
    complaints = []
    for each in services_of_ours(objects):
        resources, device = (
            main_container(each).get("resources", {}),
            getattr(settings_of(each, objects), "device", "cpu"),
        )
        has = bool(resources.get("claims")) or num_gpus(resources) > 0
        if has != device.startswith("cuda"):
            complaints.append(f"{title(each)}: device {device}, and the container has {'a' if has else 'no'} GPU")
    return complaints


def test_every_environment_is_taken(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_environments(objects)) == ""


def test_devices_are_what_the_containers_have(objects: list[Object]) -> None:
    assert "\n".join(complaints_of_devices(objects)) == ""


def test_the_hub_dials_no_speculator() -> None:
    objects = rendered(Variant("cloud"))
    verifier = settings_of(named(objects, "Deployment", "target-verifier"), objects)
    assert isinstance(verifier, VerifierSettings)
    assert verifier.speculator == ""
    assert verifier.datastore


def test_tls_leaves_nothing_insecure() -> None:
    objects = rendered(gpu_with("tls"))
    for each in services_of_ours(objects):
        settings = settings_of(each, objects)
        assert settings.tls_cert, title(each)
        assert not settings.insecure, title(each)
        assert not getattr(settings, "peer_insecure", False), title(each)


def test_tracing_gives_every_service_the_standard_variables() -> None:
    for objects in (rendered(gpu_with("tracing")), rendered(Variant("edge", ("tracing",)))):
        for each in services_of_ours(objects):
            variables = environment_of(main_container(each), objects)
            assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel-collector:4317", title(each)
            assert variables["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio", title(each)
