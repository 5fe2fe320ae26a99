"""All services on this machine: Redis, the datastore, the speculators or an edge, the verifiers and a gateway, as
processes on loopback.

Used by `outrider up`, by the demo, the benchmark and the end-to-end tests. All that is started here is ended here, in
reverse order, whatever happens; what cannot be ended in order (SIGKILL of this process) dies with it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import Literal, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.security.tokens import token_from
from outrider.v1.verifier_pb2 import GetInfoRequest
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_cli.links.control import LinkControl
from outrider_cli.links.direction import LinkSettings, flags_of
from outrider_cli.links.namespaces import Namespace
from outrider_cli.local.machine import Threads, shared_out, usable_cores
from outrider_cli.local.process import LOOK_S, SILENCE_S, ManagedProcess, ProcessFailed, Silence
from outrider_cli.local.redis import free_port, running_redis

LOAD_TIMEOUT_S = 120.0
"""Seconds that a gateway may take to find its verifiers, and an edge to draft."""
LOOPBACK = "127.0.0.1"
ANY_PORT = f"{LOOPBACK}:0"
_FLAG_NAMES = {
    "verifier": {"--model": "--target", "--dtype": "--target-dtype", "--draft-model": "--draft", "--listen": "--port"},
    "speculator": {"--model": "--draft", "--dtype": "--draft-dtype"},
}
"""Flags of `outrider up` by those of the services, which their errors name."""


@dataclass(frozen=True)
class StackConfig:
    """Names the services to start, and their settings."""

    target: str = "demo/target-100m"
    """The target model, as the verifier's --model."""
    target_dtype: str = "auto"
    """Number format of the target: "auto", "bfloat16", "float32"."""
    draft: str | None = "demo/draft"
    """The draft model, as --model of the speculator or the edge; None means neither."""
    draft_dtype: str | None = None
    """Number format of the draft model; None leaves it to the service."""
    drafter: Literal["speculator", "in-process"] = "speculator"
    """The place of the draft model, if there is no edge: in speculators, or in the process of each verifier."""
    num_verifiers: int = 1
    """Verifiers, which are replicas of one another. Several require that there is no edge."""
    num_speculators: int = 1
    """Speculators, which every verifier dials. Several require that there is no link."""
    edge: bool = False
    """True if an edge has the draft model, instead of a speculator. The edge dials, a speculator is dialled."""
    datastore: bool = True
    """True if there is a datastore (and, without redis_url, a Redis)."""
    redis_url: str | None = None
    """A Redis that runs already; None means that of REDIS_URL, or one that is started here."""
    device: str = "cpu"
    """Device of both models."""
    num_threads: int | None = 1
    """Threads of each model; 0 means one for each core, None means that the models share the cores."""
    listen: str = ANY_PORT
    """Address of the first verifier; further ones choose a free port."""
    cores: tuple[int, ...] = ()
    """The verifier's core, then that of everything else; one stands for both; () means not pinned."""
    link: LinkSettings | None = None
    """The link between verifier and speculator (or edge), which can then be controlled; None means no proxy."""
    speculator_at: Namespace | None = None
    """Network namespace of the speculator, and its address there; None means ours."""
    credentials: Path | None = None
    """The verifiers' callers, who need a token of this file; None means that anybody may call."""
    token_file: Path | None = None
    """Token of the gateway, and of the code that waits for the verifiers. With `credentials` there must be one."""
    log_folder: Path | None = None
    """The folder of the logs, which stay; None means one that is deleted at the end."""
    verifier_arguments: tuple[str, ...] = ()
    """More flags for the verifier."""
    speculator_arguments: tuple[str, ...] = ()
    """More flags for the speculator."""
    edge_arguments: tuple[str, ...] = ()
    """More flags for the edge."""
    datastore_arguments: tuple[str, ...] = ()
    """More flags for the datastore."""
    gateway: bool = False
    """True if a gateway answers over HTTP in front of the verifiers."""
    gateway_listen: str = ANY_PORT
    """Address of the gateway."""
    gateway_arguments: tuple[str, ...] = ()
    """More flags for the gateway."""

    def __post_init__(self) -> None:
        if self.num_verifiers < 1 or self.num_speculators < 1:
            raise ValueError("num_verifiers and num_speculators must be at least 1")
        if self.edge and self.num_verifiers > 1:
            raise ValueError("num_verifiers must be 1 with an edge")
        if (self.link is not None or self.speculator_at is not None) and self.num_speculators > 1:
            raise ValueError("num_speculators must be 1 with a link between verifier and speculator")
        if self.is_in_process:
            if self.draft is None:
                raise ValueError("draft must be set with drafter in-process")
            has_link = self.link is not None or self.speculator_at is not None
            if self.edge or has_link or self.num_speculators > 1 or self.speculator_arguments:
                raise ValueError("drafter must be speculator with an edge, a link, or settings of speculators")

    @property
    def is_in_process(self) -> bool:
        """True if the verifiers have the draft model in their own processes."""
        return self.drafter == "in-process"

    @property
    def threads(self) -> Threads:
        """Threads of a forward of each model."""
        if self.num_threads is not None:
            return Threads(self.num_threads, self.num_threads)
        if self.device != "cpu":
            return Threads(1, 1)
        num_drafts = 0 if self.draft is None else self.num_verifiers if self.is_in_process else self.num_speculators
        threads = shared_out(usable_cores(), self.num_verifiers, num_drafts)
        # Both models of a process have the same number.
        return Threads(max(1, sum(threads) // 2), max(1, sum(threads) // 2)) if self.is_in_process else threads

    @property
    def is_fleet(self) -> bool:
        """True if a model runs more than once."""
        return self.num_verifiers > 1 or self.num_speculators > 1


class Service(ManagedProcess):
    """A `Service` is a process that answers health checks."""

    token = ""
    """Shown to it, if it asks for one."""

    def wait_serving(self, silence_s: float = SILENCE_S, on_step: Callable[[str], None] = lambda _: None) -> None:
        """Returns when its model is loaded. Raises ProcessFailed if it ends first, or does nothing for so long.

        `on_step` is called with what it does, whenever it says so.
        """
        silence = Silence(self.pid, silence_s)
        with grpc.insecure_channel(self.address) as channel:
            while not _is_serving(channel, self.token):
                if self.take_steps(LOOK_S, on_step):
                    silence.end()
                elif not self.is_running:
                    raise self.failure("did not get ready")
                elif silence.is_over():
                    raise self.failure(f"is not ready, and has done nothing for {silence_s:.0f} s")

    def is_serving(self) -> bool:
        """Asks once whether it takes calls."""
        with grpc.insecure_channel(self.address) as channel:
            return _is_serving(channel, self.token)

    def restart(self) -> None:
        """Starts it again at the same address, after ending it if it runs; returns when it serves."""
        self.stop()
        self.start()
        self.wait_serving()


def _is_serving(channel: grpc.Channel, token: str) -> bool:
    """Asks a service for its health. No answer within half a second means that it takes no calls."""
    request, metadata = health_pb2.HealthCheckRequest(service=""), [("authorization", f"Bearer {token}")]
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=0.5, metadata=metadata if token else None)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Gateway(ManagedProcess):
    """The process of a gateway, which answers health checks over HTTP."""

    @property
    def dialled(self) -> str:
        """Its address for callers on this machine."""
        host, _, port = self.address.rpartition(":")
        return f"{LOOPBACK}:{port}" if host in ("0.0.0.0", "[::]") else self.address

    def wait_serving(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Returns when it is ready, and so are verifiers. Raises ProcessFailed if it ends first, or takes longer."""
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            with suppress(OSError, HTTPException), closing(HTTPConnection(self.dialled, timeout=5.0)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == HTTPStatus.OK:
                    return
            time.sleep(0.05)
        raise self.failure("did not get ready")


class LocalStack:
    """Starts and ends the services of one configuration.

    Use it as a context manager, in a thread that lives as long as they shall: the kernel ties them to that thread.

    >>> with LocalStack(StackConfig()) as stack, BlockingClient(stack.address) as client:    # doctest: +SKIP
    ...     client.complete("def add(")
    """

    def __init__(self, config: StackConfig, on_step: Callable[[str], None] = lambda _: None) -> None:
        """Prepares a stack; `on_step` is called with a few words about each step that it waits for."""
        self.config = config
        self.redis_url: str | None = None
        self.datastore: Service | None = None
        self.speculators: list[Service] = []
        self.proxy: ManagedProcess | None = None
        self.link: LinkControl | None = None
        """The control of the link, if there is one."""
        self.verifiers: list[Service] = []
        self.edge: Service | None = None
        self.gateway: Gateway | None = None
        self.log_folder = Path()
        self._on_step = on_step
        self._exits = ExitStack()

    @property
    def verifier(self) -> Service | None:
        """The first verifier; None if it was not started."""
        return self.verifiers[0] if self.verifiers else None

    @property
    def speculator(self) -> Service | None:
        """The first speculator; None if there is none, or it was not started."""
        return self.speculators[0] if self.speculators else None

    @property
    def address(self) -> str:
        """Addresses of the verifiers, with commas between. Raises ProcessFailed if none was started."""
        if not self.verifiers:
            raise ProcessFailed("the stack is not running")
        return ",".join(verifier.address for verifier in self.verifiers)

    @property
    def edge_address(self) -> str:
        """Address of the edge. Raises ProcessFailed if it was not started."""
        if self.edge is None:
            raise ProcessFailed("the stack has no edge, or is not running")
        return self.edge.address

    @property
    def gateway_address(self) -> str:
        """Address of the gateway. Raises ProcessFailed if it was not started."""
        if self.gateway is None:
            raise ProcessFailed("the stack has no gateway, or is not running")
        return self.gateway.address

    def log_tail(self) -> str:
        """Returns the last lines of the verifier's log."""
        return self.verifier.log_tail() if self.verifier is not None else ""

    @property
    def processes(self) -> list[ManagedProcess]:
        """Everything that has been started, first to last, without Redis."""
        speculating = (*self.speculators, self.proxy, *self.verifiers)
        if self.edge is not None:
            speculating = (*self.verifiers, self.proxy, self.edge)
        return [process for process in (self.datastore, *speculating, self.gateway) if process is not None]

    def start(self) -> None:
        """Returns when all services serve. Raises ProcessFailed, RedisNotFound or RedisFailed; then nothing is left."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends everything, last started first. An interrupt while it waits turns the rest of the wait into SIGKILL."""
        self._exits.close()

    def _start(self) -> None:
        config = self.config
        self.speculators, self.verifiers = [], []
        # Entered first, so it goes last: logs are there until everything has ended.
        self.log_folder = config.log_folder or Path(self._exits.enter_context(TemporaryDirectory(prefix="outrider-")))
        self.log_folder.mkdir(parents=True, exist_ok=True)
        verifier_core, other_core = set(config.cores[:1]), set(config.cores[-1:])
        threads = config.threads
        peers: tuple[str, ...] = ()
        if config.datastore:
            self.redis_url = config.redis_url
            if self.redis_url is None:
                self._on_step("starting Redis")
                self.redis_url = self._exits.enter_context(running_redis(self.log_folder))
            self.datastore = self._spawn(
                "datastore", ("--redis-url", self.redis_url, *config.datastore_arguments), other_core
            )
            peers += ("--datastore", self.datastore.address)
        draft_flags: tuple[str, ...] = ("--model", config.draft or "", "--device", config.device)
        draft_flags += ("--num-threads", str(threads.draft))
        draft_flags += () if config.draft_dtype is None else ("--dtype", config.draft_dtype)
        if config.draft is not None and not config.edge and not config.is_in_process:
            flags = (*draft_flags, *peers, *config.speculator_arguments)
            if config.speculator_at is not None:
                flags += ("--insecure",)  # another namespace is another machine
            for number in range(config.num_speculators):
                speculator = self._spawn("speculator", flags, other_core, at=config.speculator_at, number=number)
                self.speculators.append(speculator)
            # Only a single speculator may have a link, and so a proxy.
            dialled = (self._behind_proxy(speculator.address, other_core) for speculator in self.speculators)
            peers += ("--speculator", ",".join(dialled))
        flags = ("--model", config.target, "--dtype", config.target_dtype, "--device", config.device)
        flags += ("--num-threads", str(threads.target))
        if config.is_in_process:
            flags += ("--drafter", config.drafter, "--draft-model", config.draft or "")
            flags += () if config.draft_dtype is None else ("--draft-dtype", config.draft_dtype)
            verifier_core |= other_core  # both models run there
        flags += peers + config.verifier_arguments
        if config.speculator_at is not None:
            flags += ("--peer-insecure",)
        # Without an edge no service needs the port beforehand, and 0 leaves the choice to the kernel, free of races.
        listen = _chosen(config.listen) if config.edge else config.listen
        flags += () if config.credentials is None else ("--credentials", str(config.credentials))
        for number in range(config.num_verifiers):
            verifier = self._spawn("verifier", flags, verifier_core, listen, number=number)
            verifier.token = "" if config.token_file is None else token_from([config.token_file.read_bytes()])
            self.verifiers.append(verifier)
            listen = ANY_PORT
        if config.draft is not None and config.edge:
            upstream = self._behind_proxy(self.address, other_core)
            flags = ("--upstream", upstream, *draft_flags, *config.edge_arguments)
            self.edge = self._spawn("edge", flags, other_core)
        # The slowest come last, as their steps are the ones to show.
        in_order = (self.datastore, *self.speculators, *self.verifiers, self.edge)
        services = [service for service in in_order if service is not None]
        self._on_step("starting the services, which import their libraries")
        # All must listen before a model is waited for, so that a service that refuses its flags is reported at once.
        for service in services:
            service.wait_listening()
        if config.gateway:
            # All ports of the verifiers are known only now. The gateway starts while they load.
            self.gateway = self._spawn_gateway(other_core)
        for service in services:
            service.wait_serving(on_step=self._on_step)
        if self.edge is not None:
            wait_drafting(self.edge)
        if self.gateway is not None:
            self._on_step("waiting for the gateway")
            self.gateway.wait_listening()
            self.gateway.wait_serving()

    def _spawn_gateway(self, cores: set[int]) -> Gateway:
        config = self.config
        flags = ("--upstream", self.address, *config.gateway_arguments)
        flags += () if config.token_file is None else ("--peer-token-file", str(config.token_file))
        log = self.log_folder / "gateway.log"
        names = {"--listen": "--http-port"}
        gateway = Gateway(
            "gateway", "outrider_gateway", flags, log, listen=config.gateway_listen, cores=cores, flag_names=names
        )
        self._exits.callback(gateway.stop)
        gateway.spawn()
        return gateway

    def _spawn(
        self,
        name: str,
        flags: tuple[str, ...],
        cores: set[int],
        listen: str | None = None,
        at: Namespace | None = None,
        number: int = 0,
    ) -> Service:
        """Starts a service without waiting for it: they load at the same time, knowing each other's addresses."""
        title = f"{name}-{number + 1}" if number else name
        log = self.log_folder / f"{title}.log"
        listen = listen or _free_address(at.address if at is not None else LOOPBACK)
        namespace = at.name if at is not None else ""
        service = Service(
            title,
            f"outrider.{name}",
            flags,
            log,
            listen=listen,
            cores=cores,
            namespace=namespace,
            flag_names=_FLAG_NAMES.get(name, {}),
        )
        # In this order: an interrupt in between must not leave a process behind.
        self._exits.callback(service.stop)
        service.spawn()
        return service

    def _behind_proxy(self, address: str, cores: set[int]) -> str:
        """Returns the address to dial for an address: the same, or that of a proxy before it."""
        if self.config.link is None:
            return address
        self.link = LinkControl(self.log_folder / "proxy.sock")
        flags = ("--to", address, "--control", str(self.link.path), *flags_of(self.config.link))
        log = self.log_folder / "proxy.log"
        self.proxy = ManagedProcess(
            "proxy", "outrider_cli.links.delay_proxy", flags, log, listen=_free_address(), cores=cores
        )
        self._exits.callback(self.proxy.stop)
        self.proxy.start()
        return self.proxy.address

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit while the block runs, so that its `finally`s run. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # the status that shells give a process which a signal has ended

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_address(host: str = LOOPBACK) -> str:
    """Returns an address that is free just now. If another program takes it first, the service says so and ends."""
    return f"{host}:{free_port()}"


def _chosen(address: str) -> str:
    """Returns the address with its port chosen: other services get it before this one listens there."""
    host, _, port = address.rpartition(":")
    return f"{host}:{free_port()}" if port == "0" else address


def wait_drafting(edge: Service, timeout_s: float = LOAD_TIMEOUT_S) -> None:
    """Returns when an edge drafts, which is later than when it serves. Raises ProcessFailed."""
    deadline = time.monotonic() + timeout_s
    reason = ""
    with grpc.insecure_channel(edge.address) as channel:
        stub = VerifierServiceStub(channel)
        while edge.is_running and time.monotonic() < deadline:
            speculator = stub.GetInfo(GetInfoRequest(), timeout=timeout_s).speculator
            if speculator.connected:
                return
            reason = speculator.last_error
            # Waiting does not help against any other reason, like a tokenizer that does not match.
            if "loading" not in reason:
                break
            time.sleep(0.05)
    raise edge.failure(f"does not draft: {reason}")
