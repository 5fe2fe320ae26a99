"""What a generation tells its caller: events as messages."""

from __future__ import annotations

from outrider.core.session import Verdict
from outrider.rpc.convert import finish_reason_to_proto, source_to_proto, summary_to_proto
from outrider.rpc.handshake import Model, model_info
from outrider.v1 import types_pb2, verifier_pb2
from outrider.verifier.generation import Generation

Event = verifier_pb2.Started | verifier_pb2.Chunk | verifier_pb2.Finished | types_pb2.Steering


def generate_response(event: Event) -> verifier_pb2.GenerateResponse:
    """For a caller that only reads. Raises TypeError for what only a drafter is told."""
    match event:
        case verifier_pb2.Chunk():
            return verifier_pb2.GenerateResponse(chunk=event)
        case verifier_pb2.Started():
            return verifier_pb2.GenerateResponse(started=event)
        case verifier_pb2.Finished():
            return verifier_pb2.GenerateResponse(finished=event)
    raise TypeError("only a caller that brings drafts is told how to")


def collaborate_response(event: Event) -> verifier_pb2.CollaborateResponse:
    """For a caller that brings the drafts."""
    match event:
        case verifier_pb2.Chunk():
            return verifier_pb2.CollaborateResponse(chunk=event)
        case verifier_pb2.Started():
            return verifier_pb2.CollaborateResponse(started=event)
        case verifier_pb2.Finished():
            return verifier_pb2.CollaborateResponse(finished=event)
    return verifier_pb2.CollaborateResponse(steering=event)


def started(generation: Generation, model: Model, *, shows_prompt: bool) -> verifier_pb2.Started:
    """The first event."""
    spec = generation.spec
    return verifier_pb2.Started(
        session_id=spec.session_id,
        seed=spec.sampling.seed,
        num_prompt_tokens=len(spec.prompt_token_ids),
        prompt_token_ids=spec.prompt_token_ids if shows_prompt else (),
        model=model_info(model),
    )


def chunk(verdict: Verdict, text: str, acknowledged_node_id: int) -> verifier_pb2.Chunk:
    """What a round committed. `text` is that of its tokens as far as it is decided."""
    return verifier_pb2.Chunk(
        token_ids=verdict.token_ids,
        sources=[source_to_proto(source) for source in verdict.sources],
        text=text,
        num_drafted=verdict.num_drafted,
        acknowledged_node_id=acknowledged_node_id,
    )


def finished(generation: Generation, verdict: Verdict) -> verifier_pb2.Finished:
    """The last event."""
    spec = generation.spec
    assert verdict.finish_reason is not None
    return verifier_pb2.Finished(
        reason=finish_reason_to_proto(verdict.finish_reason),
        stop_token_id=verdict.stop_token_id,
        num_prompt_tokens=len(spec.prompt_token_ids),
        num_output_tokens=verdict.base_len + len(verdict.token_ids) - len(spec.prompt_token_ids),
        summary=summary_to_proto(
            spec.speculation.method, generation.statistics, spec.requested_method, generation.traffic
        ),
    )
