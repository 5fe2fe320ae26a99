"""Drafts for vLLM: an unmodified vLLM is the target, Outrider's speculators and datastore draft for it over gRPC."""

from outrider.vllm.proposer import Proposer

__all__ = ["Proposer"]
