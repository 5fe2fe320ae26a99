"""The texts of one request as an edge sees them: each is a generation with a call, drafts and resumption of its own.

For one text, a verifier is sent the whole request, in which all others are marked as finished. The verifier thus checks
the request as if it came from the application, and gives the text the seed that it would have had there.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableSequence

from outrider.core.tree import TokenId
from outrider.v1 import verifier_pb2
from outrider.wire.resumption import MAX_CHOICES


def with_seed(request: verifier_pb2.GenerateRequest) -> verifier_pb2.GenerateRequest:
    """Returns a request with the seed set: another verifier can continue with it, and the drafter has it before the
    first response."""
    seeded = verifier_pb2.GenerateRequest()
    seeded.CopyFrom(request)
    sampling = seeded.sampling
    # An unset temperature reads as 0, but means 1.
    is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
    is_resumed = bool(request.resume_token_ids) or any(choice.token_ids for choice in request.resume_choices)
    # Not for an application that resumes without a seed: one made up here would give it a wrong text. The cloud refuses
    # that request, and names the field.
    if not sampling.HasField("seed") and (is_greedy or not is_resumed):
        sampling.seed = secrets.randbits(64)
    return seeded


def texts_of(request: verifier_pb2.GenerateRequest) -> list[int | None]:
    """Returns the number of each text that is asked for; None for one that is finished already.

    A request whose fields about its texts no verifier accepts counts as one text here: it goes up unchanged, and the
    verifier refuses it.
    """
    if not _has_several(request):
        return [0]
    finished = [choice.is_finished for choice in request.resume_choices] or [False] * request.n
    return [None if is_finished else index for index, is_finished in enumerate(finished)]


def _has_several(request: verifier_pb2.GenerateRequest) -> bool:
    is_complete = len(request.resume_choices) in (0, request.n) and not request.resume_token_ids
    return 1 < request.n <= MAX_CHOICES and is_complete


def request_of(request: verifier_pb2.GenerateRequest, index: int) -> verifier_pb2.GenerateRequest:
    """Returns the request for one of the texts alone."""
    own = verifier_pb2.GenerateRequest()
    own.CopyFrom(request)
    if _has_several(request):
        if not own.resume_choices:
            own.resume_choices.extend(verifier_pb2.ResumedChoice() for _ in range(own.n))
        for number, choice in enumerate(own.resume_choices):
            choice.is_finished = number != index
    if index:
        own.report.echo = False  # sent once, with the first text
    return own


def emitted(request: verifier_pb2.GenerateRequest, index: int) -> MutableSequence[TokenId]:
    """Returns the request's list of resumed tokens of a text: tokens that are appended to it are resumed."""
    return request.resume_choices[index].token_ids if request.resume_choices else request.resume_token_ids
