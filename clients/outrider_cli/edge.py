"""`outrider edge`: a draft model next to the application that dials the cloud's verifier, until Ctrl-C."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from outrider_cli import options
from outrider_cli.config_file import config_option
from outrider_cli.console import Steps
from outrider_cli.failures import reported
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import Service, termination_as_exit
from outrider_cli.models import check_models
from outrider_cli.options import CaFile, CertFile, Insecure, KeyFile, TokenFile

_FLAG_NAMES = {
    "--peer-token-file": "--token-file",
    "--peer-ca": "--ca-file",
    "--peer-cert": "--cert-file",
    "--peer-key": "--key-file",
    "--peer-insecure": "--insecure",
}
"""Flags of this command by those of the service. The service's errors name its own flags."""
_STANDS_FOR = {
    **{name: (f"edge.{name}",) for name in ("upstream", "model", "dtype", "device", "num_threads", "listen")},
    "token_file": ("edge.peer_token_file",),
    "ca_file": ("edge.peer_ca",),
    "cert_file": ("edge.peer_cert",),
    "key_file": ("edge.peer_key",),
    "insecure": ("edge.peer_insecure",),
}
"""Keys of --config by the flags that are the same."""


def edge(
    context: typer.Context,
    *,
    upstream: str = typer.Option(
        help="The cloud's verifier, HOST:PORT; several, with commas between, share the generations."
    ),
    model: Annotated[str, typer.Option(help="Draft model; its tokenizer must be the target's.")] = "demo/draft",
    dtype: options.DraftDtype = None,
    device: str = typer.Option("cpu", help="Device of the draft model, like cpu or cuda:0."),
    num_threads: int = typer.Option(1, min=0, help="Threads of the draft model on a CPU; 0 = one a core."),
    listen: str = typer.Option("127.0.0.1:50061", help="Where applications find it, HOST:PORT; port 0 = any free one."),
    log_folder: options.LogFolder = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    insecure: Insecure = False,
    config_file: Annotated[Path | None, config_option(_STANDS_FOR)] = None,
) -> None:
    """Runs a draft model next to the application, dialling the cloud's verifier. Ctrl-C stops it.

    Applications talk to it as to a verifier: outrider generate --address 127.0.0.1:50061 ...
    """
    flags = ["--upstream", upstream, "--model", model, "--device", device]
    flags += [] if dtype is None else ["--dtype", dtype]
    # The cloud is a peer of the edge: flags for their connection have the prefix --peer.
    files = dict(zip(_FLAG_NAMES, (token_file, ca_file, cert_file, key_file), strict=False))
    for name, path in files.items():
        flags += [name, str(path)] if path is not None else []
    flags += ["--peer-insecure"] if insecure else []
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        check_models(model, None, device, "--model")
        folder = log_folder or Path(exits.enter_context(TemporaryDirectory(prefix="outrider-")))
        folder.mkdir(parents=True, exist_ok=True)
        arguments = (*flags, "--num-threads", str(num_threads), *context.obj.arguments("edge", context))
        log = folder / "edge.log"
        service = Service("edge", "outrider.edge", arguments, log, listen=listen, flag_names=_FLAG_NAMES)
        exits.callback(service.stop)  # before the start, which may fail half-way
        steps = exits.enter_context(Steps())
        service.start()
        service.wait_serving(on_step=steps.show)
        steps.result(f"{service.name:<11}{service.address}")
        steps.show("running; Ctrl-C stops")
        for line in service.further_lines():
            steps.say(line)
        raise ProcessFailed(f"the edge {service.wait_for_ending()}; the end of its log:\n{service.log_tail()}")
