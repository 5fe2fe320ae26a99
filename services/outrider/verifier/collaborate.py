"""Drafts that the caller of Collaborate brings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from outrider.core.params import InvalidParameter, check
from outrider.core.statistics import Traffic
from outrider.models.loading import LoadedModel
from outrider.peers.speculator import DraftLimit
from outrider.v1 import verifier_pb2
from outrider.verifier.generation import Generation
from outrider.wire.convert import draft_from_proto, last_node_id
from outrider.wire.errors import InvalidArgument, RpcError, invalid_argument
from outrider.wire.handshake import check_handshake

DRAFT_WEIGHT = 16
"""What taking in a draft costs beside its nodes, in nodes."""
MAX_WAITING_WEIGHT = 4096
"""Drafts that a caller may be ahead of the engine, in nodes; then it is not read from until they are taken in."""


async def opening_of(
    requests: AsyncIterator[verifier_pb2.CollaborateRequest], model: LoadedModel
) -> verifier_pb2.CollaborateOpen:
    """The first message.

    Raises:
        InvalidArgument, InvalidParameter: it is none, or says what only a draft can say.
        FailedPrecondition: the caller speaks another protocol, or of other tokens.
    """
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("event") != "open":
        raise InvalidArgument("event", "must be open in the first message")
    for field in ("forward_us", "retrieval_us"):
        value = getattr(first, field)
        check(value == 0, field, "unset in a message without a draft", value)
    check_handshake(first.open.handshake, model)
    return first.open


class CallerDrafts:
    """The later messages of one call, read in a task of their own."""

    def __init__(self, generation: Generation, limit: DraftLimit, traffics: Sequence[Traffic]) -> None:
        """`traffics`: where the bytes that arrive are counted."""
        self.last_node_id = 0
        """The latest node that has arrived."""
        self._generation, self._limit, self._traffics = generation, limit, traffics

    async def read(self, requests: AsyncIterator[verifier_pb2.CollaborateRequest]) -> None:
        """Until the caller half-closes or says something wrong. Not faster than the engine takes drafts in."""
        weight = 0
        try:
            async for request in requests:
                weight += self._take(request)
                if weight > MAX_WAITING_WEIGHT:
                    await self._generation.drafts_taken_in()
                    weight = 0
        except RpcError as error:
            self._generation.fail(error)
        except InvalidParameter as error:
            self._generation.fail(invalid_argument(error))
        else:
            self._generation.on_detached()

    def count(self, message: verifier_pb2.CollaborateRequest | verifier_pb2.CollaborateOpen) -> None:
        """A message has arrived."""
        num_bytes = message.ByteSize()
        for traffic in self._traffics:
            traffic.num_bytes_received += num_bytes

    def _take(self, request: verifier_pb2.CollaborateRequest) -> int:
        """Returns what it weighs."""
        self.count(request)
        if request.WhichOneof("event") != "draft":
            raise InvalidArgument("event", "must be draft after the first message")
        self.last_node_id = last_node_id(request.draft)
        if self._limit.admits(request.draft):
            draft = draft_from_proto(request.draft, request.forward_us, request.retrieval_us)
            self._generation.on_draft(draft)
        return DRAFT_WEIGHT + len(request.draft.token_ids)
