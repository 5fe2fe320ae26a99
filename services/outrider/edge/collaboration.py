"""One Collaborate call: drafts up, commits down.

The draft tree begins as soon as the prompt's tokens are known: at once if the application has sent token ids or this is
not the first call for it, otherwise with `Started`. The verifier decides how it grows (`Steering`); until that message
has come, the edge guesses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from outrider.core.auto.strategies import opening_params
from outrider.core.methods import AUTO, PEARL
from outrider.core.noise import choice_seed
from outrider.core.params import InvalidParameter
from outrider.core.speculation import SpeculationLimits, SpeculationParams
from outrider.core.tree import Draft, TokenId
from outrider.edge.choices import emitted
from outrider.security.callers import current_tenant
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.convert import draft_to_proto
from outrider.wire.errors import InvalidArgument, RpcError
from outrider.wire.handshake import handshake
from outrider.wire.sampling import sampling_from_proto
from outrider.wire.speculation import METHODS_FROM_PROTO, speculation_from_proto
from outrider.wire.steering import check_drafted, steering_from_proto
from outrider.wire.structure import structure_from_proto

if TYPE_CHECKING:  # it imports torch, see there
    from outrider.speculator.drafter import Drafter

log = structlog.get_logger(__name__)

DEFAULTS = SpeculationParams(PEARL, num_speculative_tokens=12, lookahead=64, min_path_probability=0.2)
"""Guess of the parameters of a request: a verifier's defaults, unless its flags say otherwise."""


class Collaboration:
    """Runs both directions of one call. Lives on the event loop, except for `send` and `fail`."""

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        prompt_token_ids: Sequence[TokenId],
        drafter: Drafter,
        target: verifier_pb2.GetInfoResponse,
        *,
        index: int = 0,
        may_open_early: bool = True,
    ) -> None:
        """
        Args:
            request: The request, with the seed set.
            prompt_token_ids: Tokens of the prompt; empty means that they are not known yet.
            drafter: Grows the tree.
            target: Description of the verifier.
            index: Which of the texts that the request asks for.
            may_open_early: True if drafts may go up before the verifier has accepted the generation.
        """
        self._request, self._index, self._drafter, self._target = request, index, drafter, target
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._output = list(emitted(request, index))
        self._limits = SpeculationLimits(
            max_num_speculative_tokens=target.max_num_speculative_tokens, max_num_rows=target.max_num_rows
        )
        self._session_id = uuid.uuid4().hex[:16]
        # Now and not when it opens, which may be later: the place was free when the caller checked.
        drafter.reserve(self._session_id)
        self._opened: SpeculationParams | None = None
        self._current: SpeculationParams | None = None
        self._is_over = False
        self._drafts: asyncio.Queue[Draft | None] = asyncio.Queue()
        self._asks_for_prompt = not self._prompt_token_ids
        if self._prompt_token_ids and may_open_early:
            self._open_early()

    @property
    def prompt_token_ids(self) -> tuple[TokenId, ...]:
        """Tokens of the prompt; empty until they are known."""
        return self._prompt_token_ids

    def close(self) -> None:
        """Ends the drafting for this generation. The verifier sees the end of our stream. Idempotent."""
        self._is_over = True
        self._drafter.close(self._session_id)
        self._drafts.put_nowait(None)

    # Up: what the verifier is sent.

    async def requests(self) -> AsyncIterator[verifier_pb2.CollaborateRequest]:
        """Yields what is sent: the opening, then drafts as they grow."""
        yield verifier_pb2.CollaborateRequest(
            open=verifier_pb2.CollaborateOpen(
                handshake=handshake(self._drafter.model),
                request=self._request,
                wants_prompt_token_ids=self._asks_for_prompt,
            )
        )
        while (draft := await self._drafts.get()) is not None:
            yield verifier_pb2.CollaborateRequest(
                draft=draft_to_proto(draft), forward_us=draft.forward_us, retrieval_us=draft.retrieval_us
            )

    def send(self, draft: Draft) -> None:
        """See `DraftListener`."""
        self._drafts.put_nowait(draft)

    def fail(self) -> None:
        """See `DraftListener`."""
        self._drafts.put_nowait(None)

    # Down: what the verifier sends.

    def on_response(self, response: verifier_pb2.CollaborateResponse) -> verifier_pb2.GenerateResponse | None:
        """Learns from a response of the verifier; returns what the application should get of it."""
        try:
            if not self._is_over:
                self._learn_response(response)
        except (InvalidParameter, RpcError) as error:
            # Not an error of the generation: its text needs no drafts.
            log.error("edge.cannot_draft", session_id=self._session_id, reason=str(error))
            self.close()
        match response.WhichOneof("event"):
            case "started":
                started = verifier_pb2.Started()
                started.CopyFrom(response.started)
                if not self._request.report.echo:
                    del started.prompt_token_ids[:]  # the application has not asked for them
                return verifier_pb2.GenerateResponse(started=started)
            case "chunk":
                return verifier_pb2.GenerateResponse(chunk=response.chunk)
            case "finished":
                self.close()  # the verifier waits for the end of our stream
                return verifier_pb2.GenerateResponse(finished=response.finished)
            case "waiting":
                return verifier_pb2.GenerateResponse(waiting=response.waiting)
            case "reading":
                return verifier_pb2.GenerateResponse(reading=response.reading)
            case "prompt_logprobs":
                return verifier_pb2.GenerateResponse(prompt_logprobs=response.prompt_logprobs)
        return None

    def _learn_response(self, response: verifier_pb2.CollaborateResponse) -> None:
        match response.WhichOneof("event"):
            case "started" if self._asks_for_prompt:
                self._prompt_token_ids = tuple(response.started.prompt_token_ids)
            case "steering":
                self._steer(response.steering)
            case "chunk":
                # Kept even before the tree is open: it begins after all tokens committed by then.
                self._output.extend(response.chunk.token_ids)
                if self._opened is not None:
                    self._drafter.commit(
                        self._session_id, response.chunk.token_ids, response.chunk.acknowledged_node_id
                    )

    def _steer(self, message: types_pb2.Steering) -> None:
        if self._opened is None:
            self._open(speculation_from_proto(message.speculation, DEFAULTS, self._limits))
        assert self._opened is not None
        steering = steering_from_proto(message, self._opened, self._limits)
        if steering.speculation == self._current:
            # A growth policy that gets its current parameters again would start over and forget its counts.
            steering = replace(steering, speculation=None)
        self._current = steering.speculation or self._current
        self._drafter.steer(self._session_id, steering)

    def _open_early(self) -> None:
        """Begins with guessed parameters, if steering can correct them for this request."""
        message = self._request.speculation
        if message.acceptance_rule == types_pb2.ACCEPTANCE_RULE_RATIO:
            return  # at temperature 0 the verifier uses the other rule, and steering cannot change the rule
        try:
            # METHOD_AUTO has no growth policy: `opening_params` returns the strategy with which a verifier begins.
            params = speculation_from_proto(message, _defaults(self._target), self._limits)
            self._open(opening_params(params))
        except (InvalidParameter, RpcError) as error:
            # If the request is invalid, the verifier refuses it with a better message.
            log.debug("edge.no_early_draft", session_id=self._session_id, reason=str(error))

    def _open(self, speculation: SpeculationParams) -> None:
        check_drafted(speculation.method)
        if not self._prompt_token_ids:
            raise InvalidArgument("started.prompt_token_ids", "must be set: they were asked for")
        # The relay leaves the seed unset only if the verifier will refuse the request because it is missing.
        sampling = sampling_from_proto(
            self._request.sampling,
            default_seed=0,
            vocab_size=self._drafter.model.vocab_size,
            eos_token_ids=self._target.model.eos_token_ids,
            spellings=self._drafter.codec.spellings,
        )
        sampling = replace(sampling, seed=choice_seed(sampling.seed, self._index))
        committed, num_prompt_tokens = [*self._prompt_token_ids, *self._output], len(self._prompt_token_ids)
        structure = None
        if self._request.HasField("structured_outputs"):
            structure = structure_from_proto(self._request.structured_outputs)
        self._drafter.open(
            self._session_id,
            committed,
            num_prompt_tokens,
            sampling,
            speculation,
            self,
            structure,
            prefix_salt=f"caller {current_tenant() or ''}",
        )
        self._opened = self._current = speculation


def _defaults(target: verifier_pb2.GetInfoResponse) -> SpeculationParams:
    """Guesses the parameters of a request that sets none, for this verifier."""
    return SpeculationParams(
        METHODS_FROM_PROTO.get(target.default_method, AUTO),
        DEFAULTS.num_speculative_tokens,
        DEFAULTS.lookahead,
        DEFAULTS.min_path_probability,
    )
