"""deploy/compose.yaml is understood by compose and by the services, fits together, and confines them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyOptions
from redis import Redis

from outrider.datastore.settings import DatastoreSettings
from outrider.server.health_probe import main as ask_health
from outrider.server.settings import ProcessSettings, parse_settings
from outrider.speculator.settings import SpeculatorSettings
from outrider.v1 import datastore_pb2, speculator_pb2, verifier_pb2
from outrider.verifier.settings import VerifierSettings
from outrider.version import __version__
from outrider_cli.local.redis import find_program, free_port
from outrider_gateway.settings import GatewaySettings

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
SETTINGS: dict[str, type[ProcessSettings]] = {
    "retrieval-datastore": DatastoreSettings,
    "draft-speculator": SpeculatorSettings,
    "target-verifier": VerifierSettings,
    "gateway": GatewaySettings,
}
GRPC_SERVICES = {
    "retrieval-datastore": datastore_pb2.DESCRIPTOR,
    "draft-speculator": speculator_pb2.DESCRIPTOR,
    "target-verifier": verifier_pb2.DESCRIPTOR,
}
OURS = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, with its anchors resolved. Anything outside the Compose Specification is an error."""
    return read(COMPOSE)


def read(path: Path, **variables: str) -> dict[str, Any]:
    """A file as compose reads it with these variables, where ${NAME:-default} stands for one."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], path.read_text("utf-8"))
    assert "${" not in text
    parsed = PyOptions(apply_merge=True).from_yaml(text)
    parsed.validate()
    return parsed.to_dict()


def settings_of(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service's settings, from its environment."""
    for variable in [variable for variable in os.environ if variable.startswith("OUTRIDER_")]:
        monkeypatch.delenv(variable)
    for variable, value in compose["services"][name]["environment"].items():
        monkeypatch.setenv(variable, value or "")
    return parse_settings(SETTINGS[name], [])


def seconds(duration: str) -> float:
    """Seconds of 90s, 1m30s or 2m."""
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert found, duration
    return 60 * int(found[1] or 0) + int(found[2] or 0)


@OURS
def test_every_variable_is_a_setting_and_its_value_is_accepted(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = SETTINGS[name].model_config["env_prefix"]
    for variable in compose["services"][name]["environment"].keys() - {"HF_HOME", "HF_TOKEN"}:
        assert variable.startswith(prefix)
        assert variable.removeprefix(prefix).lower() in SETTINGS[name].model_fields, variable
    settings_of(compose, name, monkeypatch)


@OURS
def test_services_are_dialled_where_they_listen(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = getattr(settings_of(compose, name, monkeypatch), "peers", {})
    for address in peers.values():
        peer, _, port = address.partition(":")
        listen = compose["services"][peer]["environment"][SETTINGS[peer].model_config["env_prefix"] + "LISTEN"]
        assert listen == f"0.0.0.0:{port}"
        assert set(compose["services"][peer]["networks"]) & set(compose["services"][name]["networks"])


def test_the_datastore_dials_redis(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(compose, "retrieval-datastore", monkeypatch)
    assert settings.redis_url == "redis://redis:6379/0"
    assert set(compose["services"]["redis"]["networks"]) & set(compose["services"]["retrieval-datastore"]["networks"])


@pytest.mark.parametrize("name", GRPC_SERVICES)
def test_health_is_asked_where_it_is_told(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, *command = compose["services"][name]["healthcheck"]["test"]
    assert kind == "CMD"
    assert command[:3] == ["python", "-m", ask_health.__module__]
    address, service = command[3:]
    assert address == settings_of(compose, name, monkeypatch).health_listen
    (described,) = GRPC_SERVICES[name].services_by_name.values()
    assert service == described.full_name


def test_the_gateway_is_asked_over_http_where_it_listens(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, program, flag, source = compose["services"]["gateway"]["healthcheck"]["test"]
    assert (kind, program, flag) == ("CMD", "python", "-c")
    compile(source, "healthcheck", "exec")
    port = settings_of(compose, "gateway", monkeypatch).listen.rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/health" in source


@OURS
def test_calls_have_time_to_end(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drain_s = settings_of(compose, name, monkeypatch).drain_timeout_s
    assert seconds(compose["services"][name]["stop_grace_period"]) >= drain_s + 10


def test_two_ports_are_published_and_to_this_machine_only(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert published == {"target-verifier": ["127.0.0.1:50051:50051"], "gateway": ["127.0.0.1:8000:8000"]}
    assert compose["networks"]["inner"]["internal"] is True
    outside = {name for name, service in compose["services"].items() if set(service["networks"]) != {"inner"}}
    assert outside == {"target-verifier", "gateway", "draft-speculator"}, "models may have to be fetched"


def test_there_may_be_several_speculators(compose: dict[str, Any]) -> None:
    # With one of these there can be one container only.
    assert not compose["services"]["draft-speculator"].keys() & {"container_name", "hostname", "ports"}


def test_verifier_and_gateway_wait_for_nobody(compose: dict[str, Any]) -> None:
    assert "depends_on" not in compose["services"]["target-verifier"]
    assert "depends_on" not in compose["services"]["gateway"]
    assert compose["services"]["retrieval-datastore"]["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_every_container_is_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert [entry.partition(":")[0] for entry in service["tmpfs"]] == ["/tmp"], name
        assert not service.keys() & {"privileged", "cap_add", "pid", "network_mode", "devices"}, name
        assert service["mem_limit"], name


def test_images_are_pinned_and_built_from_the_target_of_their_name(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        image, _, tag = service["image"].rpartition(":")
        assert re.match(r"\d+\.\d+\.\d+", tag), service["image"]
        if "build" in service:
            has_demo = service["build"]["args"].get("WITH_DEMO") == "1"
            assert image == f"outrider/{service['build']['target']}"
            assert tag == __version__ + "-demo" * has_demo
            assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@OURS
def test_only_who_runs_a_demo_model_has_the_demo_pair(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = getattr(settings_of(compose, name, monkeypatch), "model", "")
    args = compose["services"][name]["build"]["args"]
    assert model.startswith("demo/") == (args.get("WITH_DEMO") == "1")


def test_models_are_named_by_variables_and_kept_in_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"OUTRIDER_TARGET": "Qwen/Qwen3-8B", "OUTRIDER_DRAFT": "Qwen/Qwen3-0.6B", "OUTRIDER_MEMORY": "32g"}
    below = read(COMPOSE, HF_TOKEN="hf_mine", **mine)
    above = read(COMPOSE.parent / "compose.gpu.yaml", **mine)
    both = merged(below, above)
    assert settings_of(below, "target-verifier", monkeypatch).model == "Qwen/Qwen3-8B"
    assert settings_of(below, "draft-speculator", monkeypatch).model == "Qwen/Qwen3-0.6B"
    assert settings_of(both, "target-verifier", monkeypatch).draft_model == "Qwen/Qwen3-0.6B"
    for name in ("target-verifier", "draft-speculator"):
        service = below["services"][name]
        assert service["mem_limit"] == both["services"]["target-verifier"]["mem_limit"] == "32gb"
        assert service["environment"]["HF_TOKEN"] == "hf_mine"
        (volume,) = service["volumes"]
        assert volume == f"models:{service['environment']['HF_HOME']}"
        assert volume.partition(":")[0] in below["volumes"]


@pytest.mark.slow
def test_redis_understands_its_command(compose: dict[str, Any], tmp_path: Path) -> None:
    program, *arguments = compose["services"]["redis"]["command"]
    assert program == "valkey-server"
    port = free_port()
    command = [find_program(), *arguments, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, Redis(port=port) as redis:
        assert server.stdout is not None
        for line in server.stdout:
            if "Ready to accept connections" in line:
                break
        told = redis.config_get("appendonly", "appendfsync", "maxmemory", "maxmemory-policy", "save")
        server.terminate()
    assert told == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": str(256 << 20),
        "maxmemory-policy": "volatile-lfu",  # priors have no expiry and stay
        "save": "",
    }


def merged(below: Any, above: Any) -> Any:
    """Merges two files as compose does: mappings by their keys; lists are concatenated."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: merged(below.get(key), above.get(key)) for key in {**below, **above}}
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *above]
    return below if above is None else above


@pytest.fixture(scope="module")
def on_a_gpu(compose: dict[str, Any]) -> dict[str, Any]:
    """Both files merged."""
    both: dict[str, Any] = merged(compose, read(COMPOSE.parent / "compose.gpu.yaml"))
    return both


def test_on_a_gpu_one_process_has_both_models(on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(on_a_gpu, "target-verifier", monkeypatch)
    assert (settings.drafter, settings.speculator) == ("in-process", "")
    assert settings.draft.device == settings.device == "cuda:0"
    services = on_a_gpu["services"]
    assert [name for name, service in services.items() if service.get("profiles")] == ["draft-speculator"]
    assert not any("draft-speculator" in service.get("depends_on", {}) for service in services.values())
    (device,) = services["target-verifier"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["capabilities"], device["count"]) == (["gpu"], 1)
    # Torch for CPUs, the image's default, finds no GPU, and images that differ have names that differ.
    assert "cpu" not in services["target-verifier"]["build"]["args"]["TORCH_INDEX_URL"]
    assert services["target-verifier"]["image"] == f"outrider/verifier:{__version__}-demo-gpu"


def test_what_is_compiled_for_a_gpu_can_be_run_where_it_goes(on_a_gpu: dict[str, Any]) -> None:
    verifier = on_a_gpu["services"]["target-verifier"]
    options = dict(entry.split(":", 1) for entry in verifier["tmpfs"])
    assert "noexec" not in options[verifier["environment"]["HOME"]].split(",")
    assert "noexec" in options["/tmp"].split(",")
    assert verifier["read_only"] is True
