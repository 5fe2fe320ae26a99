"""Openings of sessions: checks a caller's message, and makes it what the engine needs."""

from __future__ import annotations

import asyncio

from outrider.core.methods import PEARL
from outrider.core.params import check
from outrider.core.speculation import SpeculationLimits, SpeculationParams
from outrider.core.structure import Matcher
from outrider.models.loading import LoadedModel
from outrider.models.structure import BadStructure, Grammars
from outrider.speculator.drafter import check_fits
from outrider.speculator.session import DraftSessionSpec
from outrider.v1 import speculator_pb2, types_pb2
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.errors import InvalidArgument
from outrider.wire.handshake import check_handshake
from outrider.wire.sampling import sampling_from_proto
from outrider.wire.speculation import speculation_from_proto
from outrider.wire.steering import check_drafted
from outrider.wire.structure import structure_from_proto

DEFAULTS = SpeculationParams(PEARL, num_speculative_tokens=8, lookahead=32)
"""Parameters for a caller that leaves fields unset. The verifier sets all of them."""
LIMITS = SpeculationLimits()
MAX_NAME_LEN = 256
"""Longest session_id. It stands in every log line about a session."""


class Openings:
    """Makes sessions of the openings that callers send. Lives on the event loop."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._grammars: Grammars | None = None
        self._num_opened = 0

    def spec(self, opening: speculator_pb2.SpeculateOpen, forward_us: int) -> DraftSessionSpec:
        """Returns the session without the structure of its output.

        Args:
            opening: Message of the caller.
            forward_us: Time of a forward of the draft model, in microseconds.

        Raises:
            RpcError: the handshake, the length or the method does not fit; or a field is wrong.
            InvalidParameter: a field is outside its range.
        """
        model = self._model
        check_handshake(opening.handshake, model)
        committed = token_ids_from_proto(opening.committed_token_ids, model.vocab_size, "open.committed_token_ids")
        if not committed:
            raise InvalidArgument("open.committed_token_ids", "must hold at least one token")
        check_fits(len(committed), model, "open.committed_token_ids")
        num_prompt_tokens = opening.num_prompt_tokens
        check(
            1 <= num_prompt_tokens <= len(committed),
            "open.num_prompt_tokens",
            f"in [1, {len(committed)}]",
            num_prompt_tokens,
        )
        length = len(opening.session_id)
        check(length <= MAX_NAME_LEN, "open.session_id", f"at most {MAX_NAME_LEN} characters long", length)
        length = len(opening.prefix_salt)
        check(length <= MAX_NAME_LEN, "open.prefix_salt", f"at most {MAX_NAME_LEN} characters long", length)
        if not opening.sampling.HasField("seed"):
            raise InvalidArgument("open.sampling.seed", "must be set: drafts share the target's noise")
        speculation = speculation_from_proto(opening.speculation, DEFAULTS, LIMITS)
        check_drafted(speculation.method)
        self._num_opened += 1
        return DraftSessionSpec(
            # The caller's name for its logs, made unique here: a stream that is opened again is another session.
            session_id=f"{opening.session_id}/{self._num_opened}",
            committed_token_ids=committed,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling_from_proto(opening.sampling, default_seed=0, vocab_size=model.vocab_size),
            speculation=speculation,
            vocab_size=model.vocab_size,
            prefix_salt=opening.prefix_salt,
            begins_paused=0 < opening.max_forward_us < forward_us,
        )

    async def matcher(self, message: types_pb2.StructuredOutputs) -> Matcher:
        """Compiles the grammar of a session's output, in a thread. Raises InvalidArgument if it is not a grammar."""
        if self._grammars is None:
            self._grammars = Grammars(self._model.tokenizer, self._model.vocab_size, self._model.eos_token_ids)
        structure = structure_from_proto(message)
        try:
            return await asyncio.to_thread(self._grammars.matcher, structure)
        except BadStructure as error:
            raise InvalidArgument(f"open.structured_outputs.{structure.kind.value}", str(error)) from error
