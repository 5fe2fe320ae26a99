"""The `outrider` command, assembled: a file holds each subcommand."""

from __future__ import annotations

from functools import partial

import typer

from outrider.version import __version__
from outrider_cli import credentials, prior
from outrider_cli.chat import chat
from outrider_cli.demo import demo
from outrider_cli.edge import edge
from outrider_cli.failures import reported
from outrider_cli.generate import generate
from outrider_cli.help import REST, BriefCommand, CommandGroup, examples
from outrider_cli.info import info
from outrider_cli.local.process import ProcessFailed
from outrider_cli.options import METHOD_PARAMS_EPILOG
from outrider_cli.up import up

app = typer.Typer(
    name="outrider",
    cls=CommandGroup,
    epilog="Begin with `outrider demo`, or with `outrider up` and, in another terminal, `outrider generate`.\n\n"
    "Exit codes: 1 failed, 2 wrong usage, 3 server not reachable or not ready, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs the command; the entry point of the script `outrider`."""
    app()


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Shows the version."),
) -> None:
    """Distributed speculative decoding: the target model's own text, faster."""


def bench(context: typer.Context) -> None:
    """Measures every method next to plain decoding, and more. `outrider bench --help` shows what."""
    # Imported only here: it needs more packages, and more time, than all other commands together.
    with reported():
        try:
            from outrider_bench.app import app as benchmarks

            benchmarks(args=context.args, prog_name="outrider bench")
        except ModuleNotFoundError as error:
            # `demo` is `bench` and a Redis, which the suites start.
            raise ProcessFailed(f"{error.name} is not installed: pip install -e '.[demo]'") from None


def draft(context: typer.Context) -> None:
    """Makes a draft model for a target, and trains it. `outrider draft --help` shows how."""
    # Imported only here: it needs torch.
    with reported():
        try:
            from outrider_draft.app import app as drafts

            drafts(args=context.args, prog_name="outrider draft")
        except ModuleNotFoundError as error:
            raise ProcessFailed(f"{error.name} is not installed: pip install -e '.[demo]'") from None


brief = partial(app.command, cls=BriefCommand)
brief(
    epilog=examples(
        'outrider generate "def add(a, b):" --max-tokens 64',
        'outrider generate "A colour: " --regex "red|green|blue" --temperature 0',
        "outrider generate - --json < prompt.txt",
    )
    + f"\n\n{REST}{METHOD_PARAMS_EPILOG}"
)(generate)
brief(
    epilog=examples(
        "outrider chat",
        'outrider chat --system "Be brief." --temperature 0',
        "outrider chat --address verifier:50051 --token-file token --ca-file ca.pem",
    )
    + f"\n\n{REST}{METHOD_PARAMS_EPILOG}"
)(chat)
brief(
    epilog=examples(
        "outrider edge --upstream cloud:50051 --ca-file ca.pem",
        "outrider edge --upstream cloud:50051 --model Qwen/Qwen3-0.6B --insecure",
        "outrider generate --address 127.0.0.1:50061 hello",
    )
)(edge)
brief(
    epilog=examples(
        "outrider up",
        "outrider up --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --device cuda:0",
        "outrider up --lab",
    )
)(up)
brief(epilog=examples("outrider info", "outrider info --address a:50051,b:50051", "outrider info --json"))(info)
# All words after them are for their own apps, --help too.
whole = partial(
    app.command, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
whole()(bench)
whole()(draft)
brief()(demo)
app.add_typer(prior.app, name="prior")
app.add_typer(credentials.app, name="credentials")
