"""The `outrider` command: start services, generate, chat, look, measure."""

from __future__ import annotations

from contextlib import ExitStack

import typer
from rich.console import Console
from rich.table import Table

from outrider.telemetry.redaction import without_secrets
from outrider.v1 import verifier_pb2
from outrider.version import __version__
from outrider_cli import credentials, options, prior, talk
from outrider_cli import edge as edge_command
from outrider_cli.failures import reported
from outrider_cli.links.line import LinkSettings
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LocalStack, StackConfig, termination_as_exit
from outrider_cli.options import secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.errors import OutriderError
from outrider_client.requests import method_name
from outrider_client.retries import addresses_of

app = typer.Typer(
    name="outrider",
    epilog="Exit codes: 1 failed, 2 wrong usage, 3 server not reachable or not ready, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=options.METHOD_PARAMS_EPILOG)(talk.generate)
app.command(epilog=options.METHOD_PARAMS_EPILOG)(talk.chat)
app.command()(edge_command.edge)
app.add_typer(prior.app, name="prior")
app.add_typer(credentials.app, name="credentials")


def main() -> None:
    """Entry of the command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Shows the version."),
) -> None:
    """Distributed speculative decoding: the target model's own text, faster."""


@app.command()
def up(
    *,
    target: options.Target = StackConfig.target,
    target_dtype: options.TargetDtype = StackConfig.target_dtype,
    draft: options.Draft = "demo/draft",
    draft_dtype: options.DraftDtype = StackConfig.draft_dtype,
    device: options.Device = StackConfig.device,
    num_threads: options.NumThreads = StackConfig.num_threads,
    port: int = typer.Option(options.DEFAULT_PORT, min=0, max=65535, help="Port of the verifier; 0 = any free one."),
    redis_url: options.RedisUrl = None,
    speculator: bool = typer.Option(True, help="Whether there is a speculator."),
    datastore: bool = typer.Option(True, help="Whether there is a datastore, and a Redis behind it."),
    delay_ms: float = typer.Option(0.0, min=0, help="Delays the speculator's wire, each way: a remote node."),
    log_folder: options.LogFolder = None,
) -> None:
    """Starts all services on this machine. Ctrl-C stops them."""
    config = StackConfig(
        target=target,
        target_dtype=target_dtype,
        draft=draft if speculator else None,
        draft_dtype=draft_dtype,
        datastore=datastore,
        redis_url=redis_url,
        device=device,
        num_threads=num_threads,
        listen=f"127.0.0.1:{port}",
        link=LinkSettings(delay_ms=delay_ms) if delay_ms else None,
        log_folder=log_folder,
    )
    console = Console(highlight=False, soft_wrap=True)
    notes = Console(stderr=True, highlight=False)
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        status = exits.enter_context(notes.status("starting"))
        stack = exits.enter_context(LocalStack(config, status.update))
        for name, address in addresses(stack):
            console.print(f"{name:<11}{address}")
        status.update("running; Ctrl-C stops")
        stay(stack, notes)


def addresses(stack: LocalStack) -> list[tuple[str, str]]:
    """What listens where; the verifier, which applications talk to, first."""
    found = [(child.name, child.address) for child in reversed(stack.children)]
    return [*found, ("redis", without_secrets(stack.redis_url))] if stack.redis_url else found


def stay(stack: LocalStack, notes: Console) -> None:
    """Returns never: raises when the verifier ends. The others may: the text is the same without them."""
    while (ended := stack.wait()) is not stack.verifier:
        notes.print(f"the {ended.name} ended; generation goes on without it. The end of its log:\n{ended.log_tail()}")
        ended.kill()
    raise ProcessFailed(f"the verifier ended; the end of its log:\n{ended.log_tail()}")


@app.command()
@secured
def info(*, address: options.Address = options.DEFAULT_ADDRESS, security: SecurityOptions) -> None:
    """Shows what a verifier is: model, methods, limits, peers, load. Of replicas, what each of them is."""
    console = Console(highlight=False, soft_wrap=True)
    with reported(address):
        replicas, failures = addresses_of(address), list[OutriderError]()
        for replica in replicas:
            try:
                with BlockingClient(replica, **security) as client:
                    console.print(_described(replica, client.info(timeout_s=10.0)))
            except OutriderError as error:
                failures.append(error)
                if len(replicas) > 1:
                    console.print(f"address  {replica}\nstate    {error.code.name}", markup=False)
        if len(failures) == len(replicas):
            raise failures[0]


def _described(address: str, response: verifier_pb2.GetInfoResponse) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    model = response.model
    table.add_row("address", address)
    table.add_row("version", response.version)
    table.add_row("model", f"{model.model_id}, {model.dtype}" if model.dtype else model.model_id)
    table.add_row("tokenizer", f"{model.vocab_size} tokens, sha256 {model.tokenizer_hash[:12]}")
    table.add_row("context", f"{model.max_context_len} tokens")
    table.add_row("methods", ", ".join(method_name(method) for method in response.methods))
    table.add_row("default method", method_name(response.default_method))
    table.add_row("speculative tokens", f"at most {response.max_num_speculative_tokens} a round")
    table.add_row("drafted rows", f"at most {response.max_num_rows} a round")
    table.add_row("sessions", f"{response.num_sessions} of {response.max_num_sessions}")
    for name in ("speculator", "datastore"):
        peer = getattr(response, name)
        state = "connected" if peer.connected else f"not connected: {peer.last_error or 'not tried yet'}"
        shed = f"; {peer.num_shed_tokens} tokens were not recorded" if peer.num_shed_tokens else ""
        table.add_row(name, f"{peer.address} ({state}{shed})" if response.HasField(name) else "none")
    for time in response.forward_times:
        table.add_row(f"forward, {time.num_rows} rows", f"{time.forward_ms:.2f} ms")
    return table


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measures every method beside plain decoding, and more. `outrider bench --help` shows what."""
    # Imported only here: it needs more packages, and more time, than all other commands together.
    with reported():
        try:
            from outrider_bench.app import app as benchmarks
        except ModuleNotFoundError as error:
            raise ProcessFailed(f"{error.name} is missing: pip install 'outrider[demo]'") from None
        benchmarks(args=context.args, prog_name="outrider bench")


@app.command()
def demo(
    *,
    max_tokens: int = typer.Option(96, min=8, help="Tokens of each generation."),
    dtype: options.TargetDtype = StackConfig.target_dtype,
) -> None:
    """Starts everything, streams one generation, compares the methods, and ends everything. Under a minute."""
    from outrider_cli.demo import run  # the other commands start faster without it

    with reported(), termination_as_exit():
        run(max_tokens=max_tokens, target_dtype=dtype)
