"""deploy/Dockerfile is well formed, and builds a small image that runs confined."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.version import __version__
from tests.deploy.container_builds import DOCKERFILE, ROOT, Builder, Image, lacking, run, wheels_folder

# Whichever test comes first downloads a Debian and a hundred megabytes of wheels.
pytestmark = pytest.mark.timeout(600)

TARGETS = ("verifier", "speculator", "edge", "datastore", "gateway", "client")
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "cargo", "rustc"}
DATASTORE = "outrider.v1.DatastoreService"


def stages() -> dict[str, str]:
    """The Dockerfile's stages: the lines from their FROM to the next."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_dockerfile_has_a_target_for_every_image() -> None:
    assert set(TARGETS) <= stages().keys()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_starts_a_program_that_there_is(target: str) -> None:
    found = re.search(r'^ENTRYPOINT \["python", "-m", "([\w.]+)"\]$', stages()[target], flags=re.M)
    assert found is not None
    assert find_spec(f"{found[1]}.__main__") is not None


def test_the_dockerfile_is_of_this_version() -> None:
    assert f"ARG VERSION={__version__}\n" in stages()["runtime"]


def test_the_base_is_pinned() -> None:
    assert re.search(
        r"^ARG PYTHON_IMAGE=docker\.io/library/python:\d+\.\d+\.\d+-slim-\w+$", DOCKERFILE.read_text(), re.M
    )


def test_the_dockerfile_is_without_findings() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "hadolint is one of the packages of the extra dev"
    subprocess.run([program, "--failure-threshold", "style", str(DOCKERFILE)], check=True)


def test_requirements_are_those_of_the_extras_and_of_their_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    printed = run(sys.executable, "deploy/requirements.py", "datastore", "suffix").splitlines()
    extras = project["optional-dependencies"]
    assert extras["datastore"][0] == "outrider[server]"
    assert printed == [*project["dependencies"], *extras["datastore"][1:], *extras["suffix"], *extras["server"]]
    every = run(sys.executable, "deploy/requirements.py", "dev").splitlines()
    assert len(every) == len(set(every))
    assert not [requirement for requirement in every if requirement.startswith("outrider")]


@pytest.mark.parametrize(("target", "extras"), [("datastore", "datastore suffix otel"), ("gateway", "gateway otel")])
def test_who_runs_no_model_has_no_packages_for_one(target: str, extras: str) -> None:
    assert f"requirements.py {extras} >" in stages()[f"{target}-packages"]
    printed = run(sys.executable, "deploy/requirements.py", *extras.split()).splitlines()
    assert not [line for line in printed if re.match(r"torch|transformers|numba|tokenizers|llguidance", line)]


def test_an_extra_that_there_is_not_ends_the_build() -> None:
    ended = subprocess.run([sys.executable, "deploy/requirements.py", "no-such-extra"], cwd=ROOT, capture_output=True)
    assert ended.returncode != 0


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """The tool that builds images, with the base."""
    if missing := lacking():
        message = f"images cannot be built here: no {missing}"
        if os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
            pytest.fail(message)
        pytest.skip(message)
    builder = Builder(tmp_path_factory.mktemp("images"))
    try:
        builder.make_base()
        yield builder
    finally:
        builder.buildah("rm", "--all")
        shutil.rmtree(builder.storage)


@pytest.fixture(scope="module")
def image(builder: Builder) -> Image:
    """The image of the datastore."""
    return builder.build("datastore", wheels_folder("datastore", "suffix", "otel"))


def files_of(folder: Path) -> set[str]:
    """Paths of the files below a folder, except compiled Python."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.suffix != ".pyc"}


@contextmanager
def running(image: Image, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Runs an image's own program for the block; it must end well on SIGTERM."""
    service = image.start(*image.config["Entrypoint"], **env)
    try:
        yield service
    finally:
        # unshare waits for its child and is not the service, so the child gets the signal.
        (child,) = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        _, err = service.communicate(timeout=60)
    assert "server.stopped" in err
    assert service.returncode == 0


@pytest.mark.suite
def test_the_image_holds_what_the_datastore_needs_and_no_more(
    image: Image, record_property: pytest.RecordProperty
) -> None:
    record_property("num_bytes", image.num_bytes)
    print(f"outrider/datastore: {image.num_bytes / 1e6:.0f} MB with Debian's Python")
    (packages,) = (image.files / "opt" / "packages").glob("lib/python*/site-packages")
    installed = {path.name for path in packages.iterdir()}
    assert {"grpc", "redis", "hiredis", "pydivsufsort", "opentelemetry"} <= installed
    assert not {"torch", "transformers", "pip", "setuptools", "pytest"} & installed
    assert {path.name for path in (image.files / "opt").iterdir()} == {"packages", "outrider"}
    assert {"outrider", "outrider_client"} <= {path.name for path in (image.files / "opt" / "outrider").iterdir()}
    assert not list(image.files.rglob("*.safetensors"))
    assert not list((image.files / "opt").rglob("*.whl"))
    assert not (image.files / "root" / ".cache").exists()
    folders = (image.files / "usr" / "bin", image.files / "usr" / "local" / "bin", packages.parents[2] / "bin")
    assert not COMPILERS & {path.name for folder in folders for path in folder.iterdir()}
    module = image.files / "opt" / "outrider" / "outrider" / "datastore"
    assert {path.name.partition(".")[0] for path in module.glob("__pycache__/*.pyc")} >= {"service", "servicer"}


@pytest.mark.suite
def test_the_image_says_how_to_run_it(image: Image) -> None:
    config = image.config
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python", "-m", "outrider.datastore"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["ExposedPorts"].keys() == {"50053/tcp", "8080/tcp", "9464/tcp"}
    assert config["Labels"]["org.opencontainers.image.title"] == "outrider/datastore"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert {"PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"} <= set(config["Env"])
    assert not any(variable.startswith("HF_HUB_OFFLINE") for variable in config["Env"]), "a first run fetches its model"


@pytest.mark.suite
def test_the_root_is_read_only_and_the_user_is_not_root(image: Image) -> None:
    process = image.start("sh", "-c", "id -u; touch /tmp/a && touch /opt/outrider/a; grep CapEff /proc/self/status")
    out, err = process.communicate(timeout=60)
    uid, capabilities = out.splitlines()
    assert uid == "65532"
    assert int(capabilities.split()[1], 16) == 0
    assert "Read-only file system" in err


@pytest.mark.suite
def test_the_datastore_runs_confined_tells_its_health_and_ends_when_told(image: Image) -> None:
    env = {
        "OUTRIDER_DATASTORE_LISTEN": "127.0.0.1:0",
        "OUTRIDER_DATASTORE_HEALTH_LISTEN": "127.0.0.1:0",
        "OUTRIDER_DATASTORE_REDIS_URL": "redis://127.0.0.1:1/0",  # nothing listens there: it serves without Redis, too
    }
    with running(image, **env) as service:
        assert service.stdout is not None
        assert service.stderr is not None
        assert service.stdout.readline().startswith("listening ")
        health = service.stdout.readline().removeprefix("health ").strip()
        for line in service.stderr:
            if "server.serving" in line:
                break
        asked = image.start("python", "-m", "outrider.server.health_probe", health, DATASTORE, "--timeout-s", "20")
        assert asked.communicate(timeout=60)[0] == "SERVING\n"
        assert asked.returncode == 0


@pytest.mark.suite
def test_the_gateways_image_serves_confined_without_a_verifier_and_without_models(builder: Builder) -> None:
    image = builder.build("gateway", wheels_folder("gateway", "otel"))
    (packages,) = (image.files / "opt" / "packages").glob("lib/python*/site-packages")
    installed = {path.name for path in packages.iterdir()}
    assert {"grpc", "starlette", "uvicorn", "httptools", "opentelemetry"} <= installed
    assert not {"torch", "transformers", "redis", "pip"} & installed
    assert image.config["Entrypoint"] == ["python", "-m", "outrider_gateway"]
    assert "8000/tcp" in image.config["ExposedPorts"]
    page = Path("outrider_gateway") / "page"
    assert files_of(image.files / "opt" / "outrider" / page) == files_of(ROOT / "clients" / page)
    with running(image, OUTRIDER_GATEWAY_LISTEN="127.0.0.1:0", OUTRIDER_GATEWAY_UPSTREAM="127.0.0.1:1") as service:
        assert service.stdout is not None
        url = f"http://{service.stdout.readline().removeprefix('listening ').strip()}"
        with urllib.request.urlopen(f"{url}/live", timeout=30) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/health", timeout=30)
        assert refused.value.code == 503
        refused.value.close()
