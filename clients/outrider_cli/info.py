"""`outrider info`: what a verifier is, and how it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.v1 import types_pb2, verifier_pb2
from outrider_cli import options
from outrider_cli.console import counted
from outrider_cli.failures import reported
from outrider_cli.json_lines import fields_of
from outrider_cli.options import secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions, verifier_addresses
from outrider_client.enums import method_name
from outrider_client.errors import OutriderError
from outrider_gateway.tools.calls import ToolCallFormat

SHOWN_ROWS = (1, 8, 16, 32)
"""Rows of the forwards whose times are shown; --json has all of them."""


@secured
def info(
    *,
    address: options.Address = options.DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line, one for each replica.")] = False,
    security: SecurityOptions,
) -> None:
    """Shows what a verifier is: model, methods, limits, peers, load. Of replicas, what each of them is."""
    console = Console(highlight=False, soft_wrap=True)
    with reported():
        replicas, failures = verifier_addresses(address), list[OutriderError]()
        for replica in replicas:
            # A client for each: one for all of them would ask any of them, and go on to another if that fails.
            try:
                with BlockingClient(replica, **security) as client:
                    found = client.info(timeout_s=10.0)
                    if as_json:
                        print(json.dumps({"address": replica, **fields_of(found)}))
                    else:
                        console.print(_described(replica, found))
            except OutriderError as error:
                failures.append(error)
                if as_json:
                    print(json.dumps({"address": replica, "state": error.code.name}))
                elif len(replicas) > 1:
                    console.print(f"address  {replica}\nstate    {error.code.name}", markup=False)
        # A replica that does not answer is a line of the answer, as long as another one does.
        if len(failures) == len(replicas):
            raise failures[0]


def _described(address: str, response: verifier_pb2.GetInfoResponse) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    model = response.model
    table.add_row("address", address)
    table.add_row("version", response.version)
    stored_as = f"dequantised from {response.stored_as}" if response.stored_as else ""
    table.add_row("model", ", ".join(filter(None, (model.model_id, model.dtype, stored_as))))
    table.add_row("exact rows", f"no: {response.exact_off_reason}" if response.exact_off_reason else "yes")
    table.add_row("tokenizer", f"{model.vocab_size} tokens, sha256 {model.tokenizer_hash[:12]}")
    table.add_row("context", f"{model.max_context_len} tokens")
    table.add_row("sampling", _sampling(model.default_sampling))
    if response.chat_template:
        told = ToolCallFormat.of_template(response.chat_template)
        calls = "in a way that its chat template does not tell" if told is ToolCallFormat.AUTO else f"as {told.value}"
        table.add_row("tool calls", calls)
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
    if response.forward_times:
        table.add_row("forward", _forward_times(response.forward_times))
    return table


def _sampling(defaults: types_pb2.SamplingParams) -> str:
    """Returns the values that count if a request leaves them unset."""
    own = ", ".join(f"{field.name} {value:g}" for field, value in defaults.ListFields())
    if not own:
        return "temperature 1 where a request says nothing"
    return f"{own} where a request says nothing (the model's generation_config.json)"


def _forward_times(times: Iterable[verifier_pb2.ForwardTime]) -> str:
    """Returns the times of a few numbers of rows, which show how much a row costs."""
    shown = [time for time in times if time.num_rows in SHOWN_ROWS]
    return ", ".join(f"{time.forward_ms:.1f} ms ({counted(time.num_rows, 'row')})" for time in shown)


def _described_peer(peer: verifier_pb2.PeerInfo) -> str:
    state = "connected" if peer.connected else f"not connected: {peer.last_error or 'not tried yet'}"
    if peer.connected and peer.last_error:
        state += f"; {peer.last_error}"
    if peer.num_shed_tokens:
        state += f"; {peer.num_shed_tokens} tokens were not recorded"
    # The numbers of a peer that is away are old.
    if peer.connected and peer.max_num_sessions:
        state += f"; {peer.num_sessions} of {peer.max_num_sessions} sessions, {peer.num_own_sessions} of them ours"
        state += f", {peer.busy_percent} % busy"
    return f"{peer.address} ({state})"
