"""Reports about speculation next to a text: the sources of its tokens, its rounds, the trees that they verified."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from outrider.v1 import verifier_pb2
from outrider_client.enums import method_name
from outrider_client.generation import Chunk
from outrider_gateway.upstream import Upstream
from outrider_gateway.usage import round_times, source_name

COSTS_PER_NAT = 32
"""Steps per nat of a node's cost, its negative log-probability."""


async def chunk_report(upstream: Upstream, chunk: Chunk, asked: Collection[str]) -> dict[str, Any]:
    """Returns the report of a chunk; `asked` names its parts: "sources" (always), "rounds", "trees"."""
    told = token_report([chunk])
    if chunk.round is not None and "rounds" in asked:
        told["round"] = _round(chunk.round, chunk.num_drafted)
    if chunk.round is not None and "trees" in asked and chunk.round.HasField("tree"):
        told["tree"] = await _tree(upstream, chunk.round.tree)
    return told


def token_report(chunks: Sequence[Chunk], limit: int | None = None) -> dict[str, Any]:
    """Returns ids, ends and sources of the tokens of chunks. `limit`: the length at which the text was cut off."""
    ends = [end for chunk in chunks for end in chunk.text_ends]
    return {
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "text_ends": ends if limit is None else [min(end, limit) for end in ends],
        "sources": [source_name(source) for chunk in chunks for source in chunk.sources],
    }


def _round(report: verifier_pb2.RoundReport, num_drafted: int) -> dict[str, Any]:
    return {
        "method": method_name(report.method),
        "num_drafted": num_drafted,
        "num_accepted": report.num_accepted_tokens,
        "drafted_by_source": {source_name(each.source): each.num_tokens for each in report.drafted_by_source},
        "num_forward_rows": report.num_forward_rows,
        "times": round_times(report.times),
    }


async def _tree(upstream: Upstream, tree: verifier_pb2.VerifiedTree) -> dict[str, Any]:
    known = await upstream.token_bytes(tree.token_ids)
    return {
        # On the wire 0 is the root, and nodes are numbered from 1.
        "parents": [parent - 1 for parent in tree.parents],
        "token_ids": list(tree.token_ids),
        "texts": [known[token_id].decode(errors="replace") for token_id in tree.token_ids],
        "probabilities": [math.exp(-cost / COSTS_PER_NAT) for cost in tree.costs],
        "sources": [source_name(source) for source in tree.sources],
    }
