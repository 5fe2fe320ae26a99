"""Attributes of a drafted session's span: the same whether its drafts go to a caller or to this process."""

from __future__ import annotations

from outrider.telemetry.tracing import Attributes


def drafting_attributes(
    model_id: str, session_id: str, method: str, *, num_committed: int, num_drafts: int, num_nodes: int
) -> Attributes:
    """Returns the attributes of a session's span when it ends.

    Args:
        model_id: The draft model.
        session_id: Names the session.
        method: The method that its tree grew by at first.
        num_committed: Tokens that it was told of, prompt and output.
        num_drafts: Drafts that went out.
        num_nodes: Nodes in them.
    """
    return {
        "gen_ai.request.model": model_id,
        "outrider.session_id": session_id,
        "outrider.method": method,
        "outrider.num_committed_tokens": num_committed,
        "outrider.num_drafts": num_drafts,
        "outrider.num_drafted_tokens": num_nodes,
    }
