"""`outrider prior`: makes prior files, loads them into a retrieval-datastore, lists and deletes what is loaded.

A prior is a corpus of documents of token ids, made offline; the datastore answers from its n-grams.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Unpack, cast

import grpc
import typer
from rich.console import Console
from rich.table import Table

from outrider.security.tokens import CallsWithMetadata
from outrider.v1 import datastore_pb2 as pb
from outrider.v1.datastore_pb2_grpc import DatastoreServiceStub
from outrider_cli import options, prior_build
from outrider_cli.console import progress_on
from outrider_cli.failures import UNREACHABLE, reported
from outrider_cli.help import BriefCommand, CommandGroup
from outrider_cli.options import secured
from outrider_cli.prior_file import read_prior
from outrider_client.base import DEFAULT_TIMEOUT_S
from outrider_client.blocking import BlockingClient
from outrider_client.channel import ChannelSecurity, SecurityOptions, open_blocking
from outrider_client.errors import FailedPrecondition, Internal, NotFound, Unavailable, from_rpc_error

PIECE_LEN = 16_384
"""Most tokens of a message, unless one document alone has more."""
MAX_DOCUMENT_LEN = 131_072
"""Most tokens of a document; a longer one is sent in pieces."""
OVERLAP_LEN = 4
"""Tokens that neighbouring pieces share: no n-gram is lost at the seam."""
DEFAULT_CORPUS = "default"
SHOWN_HASH_LEN = 12

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Makes prior corpora for the datastore, loads them, shows them."
)
app.command(cls=BriefCommand)(prior_build.build)

Address = Annotated[
    str | None,
    typer.Option(
        envvar="OUTRIDER_ADDRESS",
        help=f"The verifier, HOST:PORT, whose datastore is meant. Default: {options.DEFAULT_ADDRESS}.",
    ),
]
Datastore = Annotated[
    str | None, typer.Option(help="The datastore, HOST:PORT. The verifier is asked only if --address is given too.")
]
Tenant = Annotated[str, typer.Option(help="Tenant that it belongs to. Default: to all.", show_default=False)]

OnProgress = Callable[[pb.LoadPriorResponse], None]


@app.command(cls=BriefCommand)
@secured
def load(
    file: Annotated[Path, typer.Argument(help="A prior file.", show_default=False)],
    *,
    corpus: Annotated[str, typer.Option(help="Its name. A prior of the same name is replaced.")] = DEFAULT_CORPUS,
    tenant: Tenant = "",
    address: Address = None,
    datastore: Datastore = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was loaded, as a JSON object.")] = False,
    security: SecurityOptions,
) -> None:
    """Loads a prior file into the datastore."""
    with reported():
        prior = read_prior(file)  # before any call: a broken file needs no server to be found
        header = prior.header
        peers = find_peers(address, datastore, **security)
        # With --datastore alone no verifier is asked: a datastore keeps priors of any tokenizer, each apart.
        if peers.verifier and peers.tokenizer_hash != header.tokenizer_hash:
            raise FailedPrecondition(
                f"{file} has token ids of the tokenizer {header.tokenizer_hash} ({header.model_id}), the verifier at "
                f"{peers.verifier} has the tokenizer {peers.tokenizer_hash}: they do not mean the same"
            )
        scope = pb.Scope(
            tokenizer_hash=header.tokenizer_hash, corpus=corpus, tenant=tenant, vocab_size=header.vocab_size
        )
        # A list: the first message announces the tokens of all of them, overlaps included.
        documents = list(split(prior.documents))
        started = time.perf_counter()
        with _connected(peers.datastore, **security) as stub, _progress(sum(map(len, documents))) as on_progress:
            loaded = send(stub, scope, documents, on_progress)
        seconds = time.perf_counter() - started
    if as_json:
        counts = {"num_tokens": loaded.num_tokens, "num_ngrams": loaded.num_ngrams}
        typer.echo(json.dumps({"corpus": corpus, "tenant": tenant, **counts, "seconds": seconds}))
        return
    _print_line(
        f"{_named(corpus, tenant)} is in use: {loaded.num_tokens} tokens, {loaded.num_ngrams} n-grams, "
        f"loaded in {seconds:.1f} s"
    )


@app.command("list", cls=BriefCommand)
@secured
def list_priors(
    *,
    address: Address = None,
    datastore: Datastore = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON instead of a table.")] = False,
    security: SecurityOptions,
) -> None:
    """Shows the priors that are loaded."""
    with reported():
        corpora = _corpora(find_peers(address, datastore, **security).datastore, **security)
    if as_json:
        names = ("corpus", "tenant", "tokenizer_hash", "num_tokens", "num_ngrams")
        typer.echo(json.dumps([{name: getattr(corpus, name) for name in names} for corpus in corpora], indent=2))
        return
    table = Table("corpus", "tenant", "tokenizer", box=None, pad_edge=False, header_style="bold")
    table.add_column("tokens", justify="right")
    table.add_column("n-grams", justify="right")
    for corpus in corpora:
        shown_hash = corpus.tokenizer_hash[:SHOWN_HASH_LEN]
        table.add_row(corpus.corpus, corpus.tenant or "all", shown_hash, str(corpus.num_tokens), str(corpus.num_ngrams))
    # Callers choose the names: [red] is a name, not a colour.
    Console(highlight=False, soft_wrap=True, markup=False, emoji=False).print(table)


@app.command(cls=BriefCommand)
@secured
def delete(
    name: Annotated[str, typer.Argument(help="Name of the corpus.", show_default=False)],
    *,
    tenant: Tenant = "",
    tokenizer: Annotated[
        str | None, typer.Option(help="Its tokenizer, as much of the hash as `list` shows. Default: the verifier's.")
    ] = None,
    address: Address = None,
    datastore: Datastore = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was deleted, as a JSON object.")] = False,
    security: SecurityOptions,
) -> None:
    """Deletes a prior from the datastore."""
    with reported():
        if tokenizer is None and datastore is not None and address is None:
            raise ValueError("--tokenizer must be given with --datastore, or --address to ask a verifier for it")
        peers = find_peers(address, datastore, **security)
        tokenizer_hash = (
            _full_hash(peers.datastore, tokenizer, **security) if tokenizer is not None else peers.tokenizer_hash
        )
        scope = pb.Scope(tokenizer_hash=tokenizer_hash, corpus=name, tenant=tenant)
        try:
            with _connected(peers.datastore, **security) as stub:
                stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=scope), timeout=DEFAULT_TIMEOUT_S)
        except NotFound:
            raise NotFound(
                f"there is no {_named(name, tenant)} with the tokenizer {tokenizer_hash[:SHOWN_HASH_LEN]}; "
                "`outrider prior list` shows what there is"
            ) from None
    if as_json:
        typer.echo(json.dumps({"corpus": name, "tenant": tenant, "tokenizer_hash": tokenizer_hash}))
        return
    _print_line(f"{_named(name, tenant)} is deleted")


@dataclass(frozen=True, slots=True)
class Peers:
    """Holds the addresses of the servers that a command calls."""

    datastore: str
    """Address of the datastore."""
    verifier: str = ""
    """Address of the verifier; empty means that the command did not call one."""
    tokenizer_hash: str = ""
    """Hash of the verifier's tokenizer; empty without a verifier."""


def find_peers(address: str | None, datastore: str | None, **security: Unpack[SecurityOptions]) -> Peers:
    """Finds the datastore that is named, or else that of the verifier. Raises FailedPrecondition without one."""
    if datastore is not None and address is None:
        return Peers(datastore)
    address = address or options.DEFAULT_ADDRESS
    with BlockingClient(address, **security) as client:
        info = client.info(timeout_s=10.0)
    if datastore is None and not info.datastore.address:
        raise FailedPrecondition(f"the verifier at {address} has no datastore; name one with --datastore")
    return Peers(datastore or info.datastore.address, address, info.model.tokenizer_hash)


@contextmanager
def _connected(address: str, **security: Unpack[SecurityOptions]) -> Iterator[DatastoreServiceStub]:
    """Yields a stub of a datastore. Its errors are raised as `OutriderError`s.

    Reports here that it is unavailable: `reported` would name the verifier as the server that cannot be reached.
    """
    secured_by = ChannelSecurity(**security)
    with open_blocking(address, secured_by.credentials_for(address)) as channel:
        try:
            yield DatastoreServiceStub(cast(grpc.Channel, CallsWithMetadata(channel, secured_by.metadata)))
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            if not isinstance(failure, Unavailable):
                raise failure from error
            _print_line(f"error: the datastore at {address} is not available: {failure.message}", stderr=True)
            raise typer.Exit(UNREACHABLE) from None


def split(documents: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yields the documents, long ones in pieces of at most MAX_DOCUMENT_LEN tokens that overlap by OVERLAP_LEN."""
    for document in documents:
        # A piece of no more than the overlap is not needed: the one before has all of it.
        for start in range(0, max(1, len(document) - OVERLAP_LEN), MAX_DOCUMENT_LEN - OVERLAP_LEN):
            yield document[start : start + MAX_DOCUMENT_LEN]


def requests(scope: pb.Scope, documents: Sequence[Sequence[int]]) -> Iterator[pb.LoadPriorRequest]:
    """Yields the messages that load these documents."""
    request = pb.LoadPriorRequest(scope=scope, num_tokens=sum(map(len, documents)))
    room = PIECE_LEN
    for document in documents:
        # Never an empty message: a document that is longer than all the room goes alone.
        if len(document) > room and request.documents:
            yield request
            request, room = pb.LoadPriorRequest(), PIECE_LEN  # only the first one has the scope
        request.documents.add(token_ids=document)
        room -= len(document)
    yield request


def send(
    stub: DatastoreServiceStub, scope: pb.Scope, documents: Sequence[Sequence[int]], on_progress: OnProgress
) -> pb.LoadPriorResponse:
    """Loads documents and returns the last response. Raises Internal if they are not in use by then."""
    # Without a deadline: the time depends on the size, and the answers show that it goes on.
    call = stub.LoadPrior(requests(scope, documents))
    response = pb.LoadPriorResponse()
    try:
        for response in call:
            on_progress(response)
    finally:
        call.cancel()  # no effect on a call that is over; the server discards what it got in one that is not
    if not response.is_done:
        raise Internal("the datastore ended the stream without saying that the prior is in use")
    return response


@contextmanager
def _progress(num_tokens: int) -> Iterator[OnProgress]:
    """Shows a bar on terminals: tokens that the datastore has received, then n-grams that it has stored."""
    with progress_on(Console(stderr=True)) as progress:
        task = progress.add_task("sending tokens", total=num_tokens)

        def on_progress(response: pb.LoadPriorResponse) -> None:
            # 0 until all tokens have come and are counted.
            if response.num_ngrams:
                done, total, step = response.num_stored_ngrams, response.num_ngrams, "storing n-grams"
            else:
                done, total, step = response.num_tokens, num_tokens, "sending tokens"
            progress.update(task, completed=done, total=total, description=step)

        yield on_progress


def _corpora(address: str, **security: Unpack[SecurityOptions]) -> list[pb.CorpusInfo]:
    """Returns the priors of a datastore by name; the one for all tenants stands before those of tenants."""
    with _connected(address, **security) as stub:
        response = stub.ListCorpora(pb.ListCorporaRequest(), timeout=DEFAULT_TIMEOUT_S)
    return sorted(response.corpora, key=lambda corpus: (corpus.corpus, corpus.tenant, corpus.tokenizer_hash))


def _full_hash(address: str, beginning: str, **security: Unpack[SecurityOptions]) -> str:
    """Returns the tokenizer hash of a loaded prior that begins so; the beginning itself without a match."""
    # A set: several priors of one tokenizer do not make the beginning ambiguous.
    hashes = sorted({corpus.tokenizer_hash for corpus in _corpora(address, **security)})
    found = [tokenizer_hash for tokenizer_hash in hashes if tokenizer_hash.startswith(beginning)]
    if len(found) > 1:
        raise ValueError(f"--tokenizer {beginning!r} may be any of {', '.join(found)}")
    return found[0] if found else beginning


def _named(corpus: str, tenant: str) -> str:
    return f"prior {corpus!r} of " + (f"the tenant {tenant!r}" if tenant else "all tenants")


def _print_line(text: str, *, stderr: bool = False) -> None:
    # Names and paths may have brackets, which rich would take for markup.
    Console(stderr=stderr, highlight=False, soft_wrap=True).print(text, markup=False)
