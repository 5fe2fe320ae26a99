"""Three services as processes, with TLS and credentials, on a Redis with a password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.redis import free_port, started_redis
from tests.support.certificates import Authority, Pair, credentials_file, entry, replaced

NAMES = ("datastore", "speculator", "verifier")
REDIS_PASSWORD = "redis-s3cret"
TOKENS = {name: f"t0ken-of-{name}" for name in ("service", "acme", "evil", "poor", "drafter")}
ENTRIES = [
    entry(TOKENS["service"], "service"),
    entry(TOKENS["acme"], "generate", tenant="acme"),
    entry(TOKENS["evil"], "generate", tenant="evil"),
    entry(TOKENS["poor"], "generate", tenant="poor", requests_per_minute=1),
    entry(TOKENS["drafter"], "draft", tenant="drafter"),
]
OUTSIDERS = {"verifier": TOKENS["drafter"], "speculator": TOKENS["acme"], "datastore": TOKENS["acme"]}
"""For each service, the token of a known caller that has no permission there."""
LOAD_TIMEOUT_S = 60.0


@dataclass
class SecuredStack:
    """The running services, and their files."""

    folder: Path
    authority: Authority
    children: dict[str, ManagedProcess]

    @property
    def ca(self) -> Path:
        """The certificate authority that everybody trusts."""
        return self.folder / "ca.pem"

    @property
    def credentials(self) -> Path:
        """The credentials file of all services."""
        return self.folder / "credentials.json"

    @property
    def service_token(self) -> Path:
        """The token with which services authenticate to each other."""
        return self.folder / "service.token"

    def address(self, name: str) -> str:
        """The address on which a service listens."""
        return self.children[name].address

    def files(self, name: str = "client") -> dict[str, Any]:
        """New files of a client, as keyword arguments of the SDK."""
        cert, key = self.authority.issue(name).write(self.folder, name)
        return {"cert_file": cert, "key_file": key, "ca_file": self.ca}

    def channel(self, name: str, pair: Pair | None = None) -> grpc.Channel:
        """A channel to a service, with a certificate."""
        pair = self.authority.issue("client") if pair is None else pair
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes(), pair.key, pair.cert)
        return grpc.secure_channel(self.address(name), credentials)

    def logs(self) -> str:
        """Everything that the services have logged."""
        return "\n".join(child.log.read_text() for child in self.children.values())


@contextmanager
def secured_stack(folder: Path) -> Iterator[SecuredStack]:
    """Runs the stack while the block does."""
    stack = SecuredStack(folder, Authority("ca"), {})
    replaced(stack.ca, stack.authority.pem)
    credentials_file(stack.credentials, *ENTRIES)
    replaced(stack.service_token, TOKENS["service"].encode())
    with ExitStack() as exits:
        server = exits.enter_context(started_redis(folder))
        with redis.Redis.from_url(server.url) as connection:
            connection.config_set("requirepass", REDIS_PASSWORD)
        url = f"redis://:{REDIS_PASSWORD}@127.0.0.1:{server.port}/0"
        datastore = _start(stack, exits, "datastore", "--redis-url", url)
        models = ("--num-threads", "1", "--datastore", datastore)
        speculator = _start(stack, exits, "speculator", *models)
        _start(stack, exits, "verifier", "--model", "demo/target", *models, "--speculator", speculator)
        yield stack


def _start(stack: SecuredStack, exits: ExitStack, name: str, *flags: str) -> str:
    """Starts a service; returns its address once it serves."""
    cert, key = map(str, stack.authority.issue(name).write(stack.folder, name))
    health = f"127.0.0.1:{free_port()}"
    secure = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(stack.ca)]
    secure += ["--credentials", str(stack.credentials), "--health-listen", health, "--log-level", "debug"]
    if name != "datastore":
        secure += ["--peer-ca", str(stack.ca), "--peer-cert", cert, "--peer-key", key]
        secure += ["--peer-token-file", str(stack.service_token)]
    log = stack.folder / f"{name}.log"
    child = ManagedProcess(name, f"outrider.{name}", [*flags, *secure], log, listen="127.0.0.1:0")
    exits.callback(child.stop)
    child.start()
    stack.children[name] = child
    _wait_serving(health)
    return child.address


def _wait_serving(health: str) -> None:
    """Waits with the separate health address, which needs neither a certificate nor a token."""
    with grpc.insecure_channel(health) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(request, timeout=LOAD_TIMEOUT_S, wait_for_ready=True)
        for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
