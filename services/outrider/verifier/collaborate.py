"""The messages of a caller of Collaborate, which supplies the drafts of its generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from outrider.core.params import InvalidParameter, check
from outrider.core.statistics import Absence, Traffic
from outrider.models.loading import LoadedModel
from outrider.peers.speculator import DraftLimit
from outrider.v1 import verifier_pb2
from outrider.verifier.generation import Generation
from outrider.wire.convert import draft_from_proto, last_node_id
from outrider.wire.errors import InvalidArgument, RpcError, invalid_argument
from outrider.wire.handshake import check_handshake

DRAFT_WEIGHT = 16
"""Work of taking in a draft besides that of its nodes, in nodes."""
MAX_WAITING_WEIGHT = 4096
"""Most work that a caller may be ahead of the engine; beyond it, nothing is read until its drafts are taken in."""


async def opening_of(
    requests: AsyncIterator[verifier_pb2.CollaborateRequest], model: LoadedModel
) -> verifier_pb2.CollaborateOpen:
    """Reads and checks the first message.

    Raises:
        InvalidArgument, InvalidParameter: the message does not open a collaboration, or has a field that belongs to a
            draft.
        FailedPrecondition: the caller speaks another version of the protocol, or has another tokenizer.
    """
    first = await anext(aiter(requests), None)  # None: half-closed without a message
    if first is None or first.WhichOneof("event") != "open":
        raise InvalidArgument("event", "must be open in the first message")
    for field in ("forward_us", "retrieval_us"):
        value = getattr(first, field)
        check(value == 0, field, "unset in a message without a draft", value)
    check_handshake(first.open.handshake, model)
    return first.open


class CallerDrafts:
    """Passes the drafts of one call on to its generation, in a task next to the one that answers."""

    def __init__(self, generation: Generation, limit: DraftLimit, traffics: Sequence[Traffic]) -> None:
        """
        Args:
            generation: Takes the drafts.
            limit: Drops drafts that come too fast.
            traffics: Count the bytes of the call, both ways.
        """
        self.last_node_id = 0
        """The latest node that has arrived, to be acknowledged."""
        self._generation, self._limit, self._traffics = generation, limit, traffics

    async def read(self, requests: AsyncIterator[verifier_pb2.CollaborateRequest]) -> None:
        """Reads until the caller half-closes or sends something wrong. Reads no faster than the engine takes drafts
        in."""
        weight = 0
        try:
            async for request in requests:
                weight += self._take(request)
                if weight > MAX_WAITING_WEIGHT:
                    # Unread messages fill HTTP/2's window, which holds the caller back.
                    await self._generation.drafts_taken_in()
                    weight = 0
        except RpcError as error:
            # Passed to the generation: raised here, an error would end this task, and the generation would go on.
            self._generation.fail(error)
        except InvalidParameter as error:
            self._generation.fail(invalid_argument(error))
        else:
            self._generation.on_detached(Absence.LOST)

    def count_received(self, message: verifier_pb2.CollaborateRequest | verifier_pb2.CollaborateOpen) -> None:
        """Counts a message of the caller."""
        num_bytes = message.ByteSize()
        for traffic in self._traffics:
            traffic.num_bytes_received += num_bytes

    def count_sent(self, message: verifier_pb2.CollaborateResponse) -> None:
        """Counts a message to the caller."""
        num_bytes = message.ByteSize()
        for traffic in self._traffics:
            traffic.num_bytes_sent += num_bytes

    def _take(self, request: verifier_pb2.CollaborateRequest) -> int:
        """Passes a draft on. Returns its work."""
        self.count_received(request)
        if request.WhichOneof("event") != "draft":
            raise InvalidArgument("event", "must be draft after the first message")
        # Set for a dropped draft too: an acknowledgement says what has arrived.
        self.last_node_id = last_node_id(request.draft)
        if self._limit.admits(request.draft):
            draft = draft_from_proto(request.draft, request.forward_us, request.retrieval_us)
            self._generation.on_draft(draft)
        return DRAFT_WEIGHT + len(request.draft.token_ids)
