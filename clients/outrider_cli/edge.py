"""`outrider edge`: a draft model beside the application that dials the cloud's verifier, until Ctrl-C."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console

from outrider_cli import options
from outrider_cli.failures import reported
from outrider_cli.local.process import ProcessFailed, wait_for_end
from outrider_cli.local.stack import Service, termination_as_exit
from outrider_cli.options import CaFile, CertFile, Insecure, KeyFile, TokenFile


def edge(
    *,
    upstream: str = typer.Option(
        help="The cloud's verifier, HOST:PORT; several, with commas between, share the generations."
    ),
    model: options.Draft = "demo/draft",
    dtype: options.DraftDtype = "float32",
    device: str = typer.Option("cpu", help="Device of the draft model, like cpu or cuda:0."),
    num_threads: int = typer.Option(1, min=0, help="Threads of the draft model on a CPU; 0 = one a core."),
    listen: str = typer.Option("127.0.0.1:50061", help="Where applications find it, HOST:PORT; port 0 = any free one."),
    log_folder: options.LogFolder = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    insecure: Insecure = False,
) -> None:
    """Runs a draft model beside the application, dialling the cloud's verifier. Ctrl-C stops it.

    Applications talk to it as to a verifier: outrider generate --address 127.0.0.1:50061 ...
    """
    flags = ["--upstream", upstream, "--model", model, "--dtype", dtype, "--device", device]
    # To the edge the cloud is a peer: what it shows to it, and expects of it, has that prefix.
    files = {"token-file": token_file, "ca": ca_file, "cert": cert_file, "key": key_file}
    for name, path in files.items():
        flags += [f"--peer-{name}", str(path)] if path is not None else []
    flags += ["--peer-insecure"] if insecure else []
    err = Console(stderr=True, highlight=False)
    with ExitStack() as exits:
        exits.enter_context(reported())
        exits.enter_context(termination_as_exit())
        folder = log_folder or Path(exits.enter_context(TemporaryDirectory(prefix="outrider-")))
        folder.mkdir(parents=True, exist_ok=True)
        arguments = (*flags, "--num-threads", str(num_threads))
        service = Service("edge", "outrider.edge", arguments, folder / "edge.log", listen=listen)
        exits.callback(service.stop)  # before the start, which may fail half-way
        status = exits.enter_context(err.status("starting"))
        service.start()
        service.wait_serving()
        Console(highlight=False, soft_wrap=True).print(f"{service.name:<11}{service.address}")
        status.update("running; Ctrl-C stops")
        wait_for_end([service])
        raise ProcessFailed(f"the edge ended; the end of its log:\n{service.log_tail()}")
