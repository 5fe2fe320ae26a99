"""`outrider info`: what a verifier is, and how it is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from outrider.security.addresses import addresses_of
from outrider.v1 import verifier_pb2
from outrider_cli import options
from outrider_cli.failures import reported
from outrider_cli.options import secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.enums import method_name
from outrider_client.errors import OutriderError


@secured
def info(*, address: options.Address = options.DEFAULT_ADDRESS, security: SecurityOptions) -> None:
    """Shows what a verifier is: model, methods, limits, peers, load. Of replicas, what each of them is."""
    console = Console(highlight=False, soft_wrap=True)
    with reported(address):
        replicas, failures = addresses_of(address), list[OutriderError]()
        for replica in replicas:
            # A client for each: one of all of them would ask whichever it likes, and go on at another if that fails.
            try:
                with BlockingClient(replica, **security) as client:
                    console.print(_described(replica, client.info(timeout_s=10.0)))
            except OutriderError as error:
                failures.append(error)
                if len(replicas) > 1:
                    console.print(f"address  {replica}\nstate    {error.code.name}", markup=False)
        # A replica that does not answer is a line of the answer, as long as another one does.
        if len(failures) == len(replicas):
            raise failures[0]


def _described(address: str, response: verifier_pb2.GetInfoResponse) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    model = response.model
    table.add_row("address", address)
    table.add_row("version", response.version)
    table.add_row("model", f"{model.model_id}, {model.dtype}" if model.dtype else model.model_id)
    table.add_row("exact rows", f"no: {response.exact_off_reason}" if response.exact_off_reason else "yes")
    table.add_row("tokenizer", f"{model.vocab_size} tokens, sha256 {model.tokenizer_hash[:12]}")
    table.add_row("context", f"{model.max_context_len} tokens")
    table.add_row("methods", ", ".join(method_name(method) for method in response.methods))
    table.add_row("default method", method_name(response.default_method))
    table.add_row("speculative tokens", f"at most {response.max_num_speculative_tokens} a round")
    table.add_row("drafted rows", f"at most {response.max_num_rows} a round")
    queued = f", {response.num_queued} of them wait for room" if response.num_queued else ""
    table.add_row("sessions", f"{response.num_sessions} of {response.max_num_sessions}{queued}")
    pool = response.kv_pool
    table.add_row("keys and values", f"{pool.num_held_tokens} of {pool.num_tokens} tokens held")
    # An unset message reads like an empty one: only its presence tells that there is such a peer. An edge, and an older
    # server, describe one speculator.
    speculators = list(response.speculators) or [response.speculator] * response.HasField("speculator")
    table.add_row("speculator", "\n".join(map(_described_peer, speculators)) or "none")
    table.add_row("datastore", _described_peer(response.datastore) if response.HasField("datastore") else "none")
    for time in response.forward_times:
        table.add_row(f"forward, {time.num_rows} rows", f"{time.forward_ms:.2f} ms")
    return table


def _described_peer(peer: verifier_pb2.PeerInfo) -> str:
    state = "connected" if peer.connected else f"not connected: {peer.last_error or 'not tried yet'}"
    if peer.num_shed_tokens:
        state += f"; {peer.num_shed_tokens} tokens were not recorded"
    # Of one that is away the numbers are old.
    if peer.connected and peer.max_num_sessions:
        state += f"; {peer.num_sessions} of {peer.max_num_sessions} sessions, {peer.num_own_sessions} of them ours"
        state += f", {peer.busy_percent} % busy"
    return f"{peer.address} ({state})"
