"""`outrider up`: all services on this machine, until Ctrl-C.

A service that dies is started anew, the verifier too: its clients resume their texts. `up` ends by itself only when no
verifier stays alive.
"""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from outrider.security.addresses import REDIS_URL_RULE, is_redis_url
from outrider.telemetry.redaction import without_secrets
from outrider_cli import options
from outrider_cli.failures import reported
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.downloads import download
from outrider_cli.local.lab import Lab, LabSocket
from outrider_cli.local.ports import why_taken, why_unreachable
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LOOPBACK, LocalStack, StackConfig, termination_as_exit
from outrider_cli.local.supervision import Supervisor
from outrider_cli.steps import Steps

DEFAULT_HTTP_PORT = 8000
EXAMPLE = "def add(a, b):"


def up(
    *,
    target: options.Target = StackConfig.target,
    target_dtype: options.TargetDtype = "auto",
    draft: options.Draft = "demo/draft",
    draft_dtype: options.DraftDtype = None,
    drafter: options.Drafter = StackConfig.drafter,
    device: options.Device = StackConfig.device,
    num_threads: options.NumThreads = StackConfig.num_threads,
    port: int = typer.Option(
        options.DEFAULT_PORT, min=0, max=65535, help="Port of the first verifier; 0 = any free one."
    ),
    http_port: int = typer.Option(
        DEFAULT_HTTP_PORT, min=0, max=65535, help="Port of OpenAI's API and of the page; 0 = any free one."
    ),
    num_verifiers: int = typer.Option(1, min=1, help="Verifiers: replicas, among which a client chooses."),
    num_speculators: int = typer.Option(1, min=1, help="Speculators, which share the sessions."),
    redis_url: options.RedisUrl = None,
    speculator: bool = typer.Option(True, help="Whether there is a speculator."),
    datastore: bool = typer.Option(True, help="Whether there is a datastore, and a Redis behind it."),
    gateway: bool = typer.Option(True, help="Whether there is a gateway: OpenAI's API and a page, over HTTP."),
    lab: bool = typer.Option(
        False,
        "--lab",
        help="Lets the page delay the speculator's wire; costs a quarter of the speed.",
    ),
    delay_ms: float = typer.Option(0.0, min=0, help="Delays the speculator's wire, each way: a remote node."),
    log_folder: options.LogFolder = None,
) -> None:
    """Starts all services on this machine. Ctrl-C stops them."""
    if (delay_ms or lab) and num_speculators > 1:
        raise typer.BadParameter(
            "delays the wire of one speculator: it needs --num-speculators 1",
            param_hint="--delay-ms" if delay_ms else "--lab",
        )
    if not speculator and num_speculators > 1:
        raise typer.BadParameter("must be 1 with --no-speculator", param_hint="--num-speculators")
    is_in_process = drafter == "in-process"
    if is_in_process and not speculator:
        raise typer.BadParameter("must be speculator with --no-speculator", param_hint="--drafter")
    if is_in_process and (num_speculators > 1 or delay_ms or lab):
        flag = "--lab" if lab else "--delay-ms" if delay_ms else "--num-speculators"
        raise typer.BadParameter(f"must be speculator with {flag}", param_hint="--drafter")
    if lab and not (speculator and gateway):
        raise typer.BadParameter("needs a speculator and a gateway", param_hint="--lab")
    if redis_url is not None and not is_redis_url(redis_url):
        # What was given is not told: there may be a password in it.
        raise typer.BadParameter(f"must be {REDIS_URL_RULE}", param_hint="--redis-url (or REDIS_URL)")
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        _check_free("--port", port)
        if gateway:
            _check_free("--http-port", http_port, ", and --no-gateway does without")
        steps = exits.enter_context(Steps())
        if datastore and redis_url and (reason := why_unreachable(redis_url)):
            steps.say(f"redis: not reachable ({reason}); retrieval keeps to memory")
        num_drafting = num_speculators if speculator and not is_in_process else 0
        if device != "cpu" and num_verifiers + num_drafting > 1:
            steps.say(_of_several(num_verifiers + num_drafting, device, has_speculators=num_drafting > 0))
        # A short path of its own: the operating system allows some 100 letters for one of a socket.
        lab_socket = Path(exits.enter_context(TemporaryDirectory(prefix="outrider-lab-"))) / "lab.sock"
        config = StackConfig(
            target=target,
            target_dtype=target_dtype,
            draft=draft if speculator else None,
            draft_dtype=draft_dtype,
            drafter=drafter,
            num_verifiers=num_verifiers,
            num_speculators=num_speculators,
            datastore=datastore,
            redis_url=redis_url,
            device=device,
            num_threads=num_threads,
            listen=f"{LOOPBACK}:{port}",
            link=LinkSettings(delay_ms=delay_ms) if delay_ms or lab else None,
            log_folder=log_folder,
            gateway=gateway,
            gateway_listen=f"{LOOPBACK}:{http_port}",
            gateway_arguments=("--lab-socket", str(lab_socket)),
        )
        download([target, *([draft] if speculator else [])], steps.show)
        stack = exits.enter_context(LocalStack(config, steps.show))
        supervisor = Supervisor(stack.processes, stack.verifiers, steps.say)
        if gateway:
            served = LabSocket(lab_socket, Lab(stack, supervisor.kill), supervisor.selector)
            exits.callback(served.close)
        steps.result("\n".join([*_addresses(stack), "", *_first_steps(stack)]))
        steps.show("running; Ctrl-C stops")
        supervisor.run()


def _of_several(num_processes: int, device: str, *, has_speculators: bool) -> str:
    """Says what happens to several processes on one GPU, and what helps."""
    in_one = (
        "--drafter in-process makes verifier and speculator one process, which divides it; " if has_speculators else ""
    )
    return (
        f"{num_processes} processes take turns on {device}, and each takes of its memory what it finds free: {in_one}"
        "NVIDIA's MPS lets several run on one GPU side by side"
    )


def _check_free(flag: str, port: int, otherwise: str = "") -> None:
    """Raises ProcessFailed, with advice, if a port is taken: it would else be found out when all is loaded."""
    if reason := why_taken(LOOPBACK, port):
        raise ProcessFailed(f"{reason}. {flag} 0 takes a free one{otherwise}")


def _addresses(stack: LocalStack) -> list[str]:
    """Returns a line for each service; the verifier, which applications talk to, comes first."""
    others = (stack.gateway, stack.proxy, *stack.speculators, stack.datastore)
    processes = (*stack.verifiers, *others)
    found = [(process.name, process.address) for process in processes if process is not None]
    if stack.redis_url:
        found.append(("redis", without_secrets(stack.redis_url)))
    if len(stack.verifiers) > 1:
        found.append(("clients dial", stack.address))
    width = 13 if stack.config.is_fleet else 11
    return [f"{name:<{width}}{address}" for name, address in found]


def _first_steps(stack: LocalStack) -> list[str]:
    """Returns lines that work as they stand: what to type next."""
    is_default = stack.address == options.DEFAULT_ADDRESS
    address = "" if is_default else f" --address {stack.address}"
    command = f'try:  outrider generate{address} "{EXAMPLE}"'
    if stack.gateway is None:
        return [command]
    url = f"http://{stack.gateway.address}"
    body = json.dumps({"model": stack.config.target, "prompt": f"{EXAMPLE}\n", "max_tokens": 64, "temperature": 0})
    curl = f"curl {url}/v1/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    return [f"api:  {url}/v1", f"try:  {curl}", command, f"open  {url}"]
