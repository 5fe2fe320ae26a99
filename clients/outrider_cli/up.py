"""`outrider up`: all services on this machine, until Ctrl-C."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

import typer
from rich.console import Console

from outrider.telemetry.redaction import without_secrets
from outrider_cli import options
from outrider_cli.failures import reported
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LocalStack, StackConfig, termination_as_exit


def up(
    *,
    target: options.Target = StackConfig.target,
    target_dtype: options.TargetDtype = StackConfig.target_dtype,
    draft: options.Draft = "demo/draft",
    draft_dtype: options.DraftDtype = StackConfig.draft_dtype,
    device: options.Device = StackConfig.device,
    num_threads: options.NumThreads = StackConfig.num_threads,
    port: int = typer.Option(
        options.DEFAULT_PORT, min=0, max=65535, help="Port of the first verifier; 0 = any free one, as of all others."
    ),
    num_verifiers: int = typer.Option(1, min=1, help="Verifiers: replicas, among which a client chooses."),
    num_speculators: int = typer.Option(1, min=1, help="Speculators: each verifier shares its sessions among them."),
    redis_url: options.RedisUrl = None,
    speculator: bool = typer.Option(True, help="Whether there is a speculator."),
    datastore: bool = typer.Option(True, help="Whether there is a datastore, and a Redis behind it."),
    delay_ms: float = typer.Option(0.0, min=0, help="Delays the speculator's wire, each way: a remote node."),
    log_folder: options.LogFolder = None,
) -> None:
    """Starts all services on this machine. Ctrl-C stops them."""
    if delay_ms and num_speculators > 1:
        raise typer.BadParameter(
            "delays the wire of one speculator: it needs --num-speculators 1", param_hint="--delay-ms"
        )
    if not speculator and num_speculators > 1:
        raise typer.BadParameter("must be 1 with --no-speculator", param_hint="--num-speculators")
    config = StackConfig(
        target=target,
        target_dtype=target_dtype,
        draft=draft if speculator else None,
        draft_dtype=draft_dtype,
        num_verifiers=num_verifiers,
        num_speculators=num_speculators,
        datastore=datastore,
        redis_url=redis_url,
        device=device,
        num_threads=num_threads,
        listen=f"127.0.0.1:{port}",
        link=LinkSettings(delay_ms=delay_ms) if delay_ms else None,
        log_folder=log_folder,
    )
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        status = exits.enter_context(err.status("starting"))
        stack = exits.enter_context(LocalStack(config, status.update))
        for name, address in addresses(stack):
            out.print(f"{name:<13}{address}" if config.is_fleet else f"{name:<11}{address}")
        if num_verifiers > 1:
            out.print(f"{'clients dial':<13}{stack.address}")
        status.update("running; Ctrl-C stops")
        stay(stack, err)


def addresses(stack: LocalStack) -> list[tuple[str, str]]:
    """Returns names and addresses; the verifier, which applications talk to, comes first."""
    others = (stack.proxy, *stack.speculators, stack.datastore)
    found = [(process.name, process.address) for process in (*stack.verifiers, *others) if process is not None]
    return [*found, ("redis", without_secrets(stack.redis_url))] if stack.redis_url else found


def stay(stack: LocalStack, err: Console) -> NoReturn:
    """Waits until the last verifier ends, and raises ProcessFailed. Others may end: the text is the same without
    them."""
    verifiers = {process for process in stack.verifiers if process.is_running}
    while (ended := stack.wait()) not in verifiers or len(verifiers) > 1:
        verifiers.discard(ended)
        err.print(f"the {ended.name} ended; generation goes on without it. The end of its log:\n{ended.log_tail()}")
        # It has closed its stdout, but may live a moment longer, and `wait` would return it again and again.
        ended.kill()
    raise ProcessFailed(f"the verifier ended; the end of its log:\n{ended.log_tail()}")
