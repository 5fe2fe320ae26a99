"""The rule by which a text that one server has begun may go on at another: SDK and edge follow the same."""

from __future__ import annotations

from outrider.v1 import types_pb2, verifier_pb2

MAX_CHOICES = 1024
"""Most texts of one request that are followed; servers take fewer."""


def difference(begun: types_pb2.ModelInfo, here: types_pb2.ModelInfo) -> str:
    """Returns why a text would not go on here as it was begun; empty if it would.

    Args:
        begun: The model that began it.
        here: The model that is asked to go on.
    """
    # The dtype, too: rounded differently, the same weights may choose another of two nearly equal tokens.
    if (begun.model_id, begun.tokenizer_hash, begun.dtype) != (here.model_id, here.tokenizer_hash, here.dtype):
        return f"serves {here.model_id} in {here.dtype}; the generation was begun by {begun.model_id} in {begun.dtype}"
    # Where the first server has promised nothing, as those do whose rows are not exact, nothing is broken.
    if begun.numerics_id and begun.numerics_id != here.numerics_id:
        return f"computes {here.model_id} with other weights, libraries or threads, or on another processor"
    return ""


def with_sampling(request: verifier_pb2.GenerateRequest, model: types_pb2.ModelInfo) -> verifier_pb2.GenerateRequest:
    """Returns a request that says of its sampling what it leaves unset and servers may differ in, as the server of this
    model has it: its text is the same wherever it goes on."""
    whole, defaults = verifier_pb2.GenerateRequest(), model.default_sampling
    whole.CopyFrom(request)
    whole.sampling.CopyFrom(_WITHOUT_DEFAULTS)
    whole.sampling.MergeFrom(defaults)
    whole.sampling.MergeFrom(request.sampling)
    if defaults.HasField("max_tokens") and not request.sampling.HasField("max_tokens"):
        # Nobody has asked for just so many.
        whole.sampling.max_tokens = max(defaults.max_tokens, request.sampling.min_tokens)
        whole.clamp_max_tokens = True
    return whole


_WITHOUT_DEFAULTS = types_pb2.SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
"""Sampling that counts where neither request nor model say anything."""
