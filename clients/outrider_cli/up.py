"""`outrider up`: all services on this machine, until Ctrl-C.

A service that dies is restarted, the verifier too: its clients resume their texts. `up` ends by itself only when no
verifier stays alive.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from outrider.security.addresses import REDIS_URL_RULE, is_loopback, is_redis_url
from outrider.telemetry.redaction import without_secrets
from outrider_cli import options
from outrider_cli.chat import can_chat
from outrider_cli.config_file import ConfigFile, config_option
from outrider_cli.console import Steps, counted
from outrider_cli.failures import FlagError, reported
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.lab import Lab, LabSocket
from outrider_cli.local.machine import usable_cores, why_taken, why_unreachable
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LOOPBACK, LocalStack, StackConfig, termination_as_exit
from outrider_cli.local.supervision import Supervisor
from outrider_cli.models import DRAFTLESS, check_models, download, draft_for
from outrider_client.blocking import BlockingClient
from outrider_gateway.tools.calls import ToolCallFormat

EXAMPLE = "def add(a, b):"
QUESTION = "Why is the sky blue?"
_OF_A_SPECULATOR = ("num_speculators", "delay_ms", "lab")
_OF_A_DRAFT = ("draft_dtype", "drafter", *_OF_A_SPECULATOR)
_OVER_HTTP = ("host", "http_port", "insecure", "served_model_name", "tool_call_format", "lab")
"""Flags that do nothing without a speculator, without a draft model, and without a gateway, in this order."""


_STANDS_FOR = {
    "target": ("verifier.model",),
    "target_dtype": ("verifier.dtype",),
    "draft": ("speculator.model",),
    "draft_dtype": ("speculator.dtype",),
    "drafter": ("verifier.drafter",),
    "device": ("verifier.device", "speculator.device"),
    "num_threads": ("verifier.num_threads", "speculator.num_threads"),
    "port": ("verifier.listen",),
    "redis_url": ("datastore.redis_url",),
    "host": ("gateway.listen",),
    "http_port": ("gateway.listen",),
    "insecure": ("gateway.insecure",),
    "credentials": ("verifier.credentials",),
    "token_file": ("gateway.peer_token_file",),
    "served_model_name": ("gateway.served_model_name",),
    "tool_call_format": ("gateway.tool_call_format",),
}
"""Keys of --config by the flags that are the same."""


def _over_http(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Over HTTP", **settings)


_Host = Annotated[str, _over_http(help="Where OpenAI's API and the page listen; beyond this machine with --insecure.")]
_Insecure = Annotated[bool, _over_http("--insecure", help="Listens to other machines without TLS.")]
_Credentials = Annotated[
    Path | None,
    typer.Option(
        help="File of the callers of verifier and API, who need a token of it; with --token-file, up's own.",
        exists=True,
        dir_okay=False,
        rich_help_panel="Security",
    ),
]
_Names = Annotated[str | None, _over_http(metavar="NAME,NAME", help="More names for the model.")]
_ToolCalls = Annotated[
    ToolCallFormat | None,
    _over_http(
        metavar="NAME", help=f"How the model writes calls of tools: {', '.join(e.value for e in ToolCallFormat)}."
    ),
]


def up(
    context: typer.Context,
    *,
    target: options.Target = StackConfig.target,
    target_dtype: options.TargetDtype = "auto",
    draft: options.Draft = None,
    draft_dtype: options.DraftDtype = None,
    drafter: options.Drafter = StackConfig.drafter,
    device: options.Device = StackConfig.device,
    num_threads: options.NumThreads = None,
    port: int = typer.Option(
        options.DEFAULT_PORT, min=0, max=65535, help="Port of the first verifier; 0 = any free one."
    ),
    http_port: int = typer.Option(
        options.DEFAULT_HTTP_PORT, min=0, max=65535, help="Port of OpenAI's API and of the page; 0 = any free one."
    ),
    num_verifiers: int = typer.Option(1, min=1, help="Verifiers: replicas, among which a client chooses."),
    num_speculators: int = typer.Option(1, min=1, help="Speculators, which share the sessions."),
    redis_url: options.RedisUrl = None,
    speculator: bool = typer.Option(True, help="Starts a speculator.", show_default=False),
    datastore: bool = typer.Option(True, help="Starts a datastore.", show_default=False),
    gateway: bool = typer.Option(True, help="Starts OpenAI's API and a page.", show_default=False),
    host: _Host = LOOPBACK,
    insecure: _Insecure = False,
    credentials: _Credentials = None,
    token_file: options.TokenFile = None,
    served_model_name: _Names = None,
    tool_call_format: _ToolCalls = None,
    lab: bool = typer.Option(
        False,
        "--lab",
        help="Lets the page delay the speculator's wire; costs a quarter of the speed.",
    ),
    delay_ms: float = typer.Option(0.0, min=0, help="Delays the speculator's wire, each way: a remote node."),
    log_folder: options.LogFolder = None,
    config_file: Annotated[Path | None, config_option(_STANDS_FOR)] = None,
) -> None:
    """Starts all services on this machine. Ctrl-C stops them."""
    drafting = draft_for(target, draft) if speculator else None
    has_speculator = drafting is not None and drafter != "in-process"
    in_file: ConfigFile = context.obj
    of_verifier, of_speculator, of_datastore, of_gateway = (
        in_file.arguments(service, context) for service in ("verifier", "speculator", "datastore", "gateway")
    )
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        for is_there, names, rule in (
            (speculator, ("draft",), "unset with --no-speculator"),
            (drafting is not None, _OF_A_DRAFT, "unset without a draft model (--draft)"),
            (datastore, ("redis_url",), "unset with --no-datastore"),
            (gateway, _OVER_HTTP, "unset with --no-gateway"),
        ):
            if not is_there:
                options.refuse_given(context, names, rule)
        if drafter == "in-process":
            options.refuse_given(context, _OF_A_SPECULATOR, "unset with --drafter in-process")
        if num_speculators > 1:
            options.refuse_given(context, ("delay_ms", "lab"), "unset with several speculators, whose wires are many")
        if redis_url is not None and not is_redis_url(redis_url):
            # The value is not shown: there may be a password in it.
            raise typer.BadParameter(f"must be {REDIS_URL_RULE}", param_hint="--redis-url (or REDIS_URL)")
        http_address = f"[{host}]:{http_port}" if ":" in host else f"{host}:{http_port}"
        if not (insecure or is_loopback(http_address)):
            raise FlagError("--host", "of this machine alone, like 127.0.0.1, or there must be --insecure", host)
        if credentials is not None and token_file is None:
            raise ValueError("--credentials needs --token-file: the gateway asks the verifier with a token of its own")
        check_models(target, drafting, device)
        _check_free({"--port": (LOOPBACK, port)} | ({"--http-port": (host, http_port)} if gateway else {}))
        steps = exits.enter_context(Steps())
        if datastore and redis_url and (reason := why_unreachable(redis_url)):
            steps.say(f"redis: not reachable ({reason}); retrieval keeps to memory")
        # A short path of its own: the operating system allows some 100 letters for one of a socket.
        lab_socket = Path(exits.enter_context(TemporaryDirectory(prefix="outrider-lab-"))) / "lab.sock"
        flags = ["--lab-socket", str(lab_socket), *(["--insecure"] if insecure else [])]
        # Unset ones are left out: they may be variables of the gateway.
        flags += [] if served_model_name is None else ["--served-model-name", served_model_name]
        flags += [] if tool_call_format is None else ["--tool-call-format", tool_call_format.value]
        config = StackConfig(
            target=target,
            target_dtype=target_dtype,
            draft=drafting,
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
            credentials=credentials,
            token_file=token_file if credentials is not None else None,
            log_folder=log_folder,
            gateway=gateway,
            gateway_listen=http_address,
            verifier_arguments=of_verifier,
            speculator_arguments=of_speculator if has_speculator else (),
            datastore_arguments=of_datastore,
            gateway_arguments=(*of_gateway, *flags),
        )
        is_unused = {
            "speculator": drafting is None or (not has_speculator and of_speculator),
            "datastore": not datastore,
            "gateway": not gateway,
        }
        for service in in_file.sections:
            if is_unused.get(service):
                steps.say(f"{config_file}: [{service}] is not used: there is no {service}")
        if drafting is None and speculator:
            steps.say(DRAFTLESS)
        is_as_told = not any("--num-threads" in each for each in (*of_verifier, *of_speculator))
        if is_as_told and (sharing := _sharing(config)):
            steps.say(sharing)
        download([target, *([] if drafting is None else [drafting])], steps.show)
        stack = exits.enter_context(LocalStack(config, steps.show))
        supervisor = Supervisor(stack.processes, stack.verifiers, steps.say)
        if gateway:
            served = LabSocket(lab_socket, Lab(stack, supervisor.kill), supervisor.selector)
            exits.callback(served.close)
        steps.result("\n".join([*_addresses(stack), "", *_first_steps(stack)]))
        steps.show("running; Ctrl-C stops")
        supervisor.run()


def _sharing(config: StackConfig) -> str:
    """Says how the models share what they run on."""
    num_drafting = 0 if config.draft is None or config.is_in_process else config.num_speculators
    if config.device != "cpu":
        num_processes = config.num_verifiers + num_drafting
        return _of_several(num_processes, config.device, has_speculators=num_drafting > 0) if num_processes > 1 else ""
    threads, cores = config.threads, counted(usable_cores(), "core")
    drafting = "" if config.draft is None else f", {counted(threads.draft, 'thread')} for the draft model"
    each = " each" if config.is_fleet else ""
    return f"{cores}: {counted(threads.target, 'thread')} for the target{drafting}{each} (--num-threads)"


def _of_several(num_processes: int, device: str, *, has_speculators: bool) -> str:
    """Says what happens to several processes on one GPU, and what helps."""
    in_one = (
        "--drafter in-process makes verifier and speculator one process, which divides it; " if has_speculators else ""
    )
    return (
        f"{num_processes} processes take turns on {device}, and each takes of its memory what it finds free: {in_one}"
        "NVIDIA's MPS lets several run on one GPU side by side"
    )


def _check_free(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Raises ProcessFailed, with the flag and advice, if a port is taken: otherwise that would show only when all is
    loaded."""
    taken = {flag: reason for flag, address in addresses.items() if (reason := why_taken(*address))}
    advice = {"--http-port": ", and --no-gateway does without"}
    if taken:
        raise ProcessFailed(
            "\n".join(f"{reason}. {flag} 0 takes a free one{advice.get(flag, '')}" for flag, reason in taken.items())
        )


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
    address = options.address_flag(stack.address)
    token_file = shlex.quote(str(stack.config.token_file)) if stack.config.token_file is not None else ""
    address += f" --token-file {token_file}" if token_file else ""
    token = f' -H "authorization: Bearer $(cat {token_file})"' if token_file else ""
    target = stack.config.target
    with BlockingClient(stack.address, token=stack.verifiers[0].token) as client:
        is_chat = can_chat(client)
    command = f"try:  outrider chat{address}" if is_chat else f'try:  outrider generate{address} "{EXAMPLE}"'
    if stack.gateway is None:
        return [command]
    url = f"http://{stack.gateway.dialled}"
    path, what = "/v1/completions", {"prompt": f"{EXAMPLE}\n", "max_tokens": 64, "temperature": 0}
    if is_chat:
        path, what = "/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    body = json.dumps({"model": target, **what})
    curl = f"curl {url}{path} -H 'content-type: application/json'{token} -d {shlex.quote(body)}"
    return [f"api:  {url}/v1", f"try:  {curl}", command, f"open  {url}"]
