"""The draft model as an object of the process that uses it: an edge's own, or a verifier's own.

Does without messages what a speculator's servicer does for remote callers: checks texts, begins sessions, tells them of
commits and ends them. Drafts come to the listener of each session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from outrider.core.blocks import PoolState, PrefixScope
from outrider.core.params import SamplingParams
from outrider.core.retrieval.retriever import TierSource
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.structure import Structure
from outrider.core.tree import TokenId
from outrider.models.engine import EngineThread
from outrider.models.loading import LoadedModel
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.speculator.engine import DraftListener, Engine
from outrider.speculator.metrics import DraftCounts
from outrider.speculator.session import DraftSessionSpec
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.errors import OutOfRange


class DrafterFlags(Protocol):
    """Settings of a draft model's engine."""

    @property
    def prefill_chunk(self) -> int:
        """Most rows of a prompt in one forward."""

    @property
    def keep_warm_s(self) -> float:
        """Seconds for which an idle model is kept in the caches."""

    @property
    def prefix_scope(self) -> str:
        """A value of `PrefixScope`."""

    @property
    def max_num_sessions(self) -> int:
        """Most sessions at a time."""


class Drafter:
    """Grows draft trees for the generations of this process. Any thread may call `commit`; all else is called on the
    event loop."""

    def __init__(
        self,
        model: LoadedModel,
        flags: DrafterFlags,
        *,
        grammars: Grammars | None = None,
        tiers: TierSource | None = None,
        forward_us: int = 0,
        loop: asyncio.AbstractEventLoop | None = None,
        host: EngineThread[Any] | None = None,
    ) -> None:
        """
        Args:
            model: The draft model.
            flags: Settings of its engine.
            grammars: Compiles the structures of outputs. None means that this makes its own.
            tiers: Copies of a datastore's tiers. None means that there is no datastore.
            forward_us: Time of a forward of one row, in microseconds; 0 means not measured.
            loop: Event loop on which listeners are called. None means the engine's thread.
            host: The target's engine, where both models share a device; see `EngineThread`.
        """
        self.model = model
        self.codec = TextCodec(model.tokenizer)
        """Makes tokens of bad words as the target does: both have the same tokenizer."""
        self.grammars = grammars or Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        """Compiles the structures of outputs."""
        self._max_num_sessions = flags.max_num_sessions
        # Kept here besides the engine's own, which change on its thread and later than a call of `reserve` or `close`.
        self._sessions: set[str] = set()
        self._engine = Engine(
            model,
            prefill_chunk=flags.prefill_chunk,
            keep_warm_s=flags.keep_warm_s,
            tiers=tiers,
            max_num_sessions=flags.max_num_sessions,
            forward_us=forward_us,
            prefix_scope=PrefixScope(flags.prefix_scope),
            loop=loop,
            host=host,
        )

    @property
    def has_room(self) -> bool:
        """True if one more generation can be drafted for."""
        return len(self._sessions) < self._max_num_sessions

    @property
    def max_num_sessions(self) -> int:
        """Most generations at a time."""
        return self._max_num_sessions

    @property
    def forward_us(self) -> int:
        """Time of a forward of one row, in microseconds; 0 means not measured."""
        return self._engine.forward_us

    @property
    def counts(self) -> DraftCounts:
        """Counts of the engine."""
        return self._engine.counts

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values right now."""
        return self._engine.num_sessions

    @property
    def has_ended(self) -> bool:
        """True if the engine's thread runs no more."""
        return self._engine.has_ended

    def fault(self) -> str:
        """Returns why nothing can be drafted; empty means that it can."""
        return self._engine.fault()

    def pool_state(self) -> PoolState:
        """Describes the draft model's pool of keys and values now."""
        return self._engine.residency.state()

    def reserve(self, session_id: str) -> None:
        """Takes the room of a session that is opened later; `close` gives it back."""
        self._sessions.add(session_id)

    def open(
        self,
        session_id: str,
        committed: Sequence[TokenId],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        speculation: SpeculationParams,
        listener: DraftListener,
        structure: Structure | None = None,
        *,
        prefix_salt: str = "",
        begins_paused: bool = False,
    ) -> None:
        """Begins a session; its room may have been reserved.

        Args:
            session_id: Names the session; no two at a time have the same.
            committed: Prompt and output so far.
            num_prompt_tokens: Length of the prompt.
            sampling: Parameters of the target's draws.
            speculation: How the tree grows.
            listener: Receives the drafts.
            structure: Description of the texts that the output must be one of. None means that it may be any.
            prefix_salt: Sessions of the same salt find each other's prefixes; empty means that this one shares none.
            begins_paused: True if nothing is read or grown before the first steering.

        Raises:
            InvalidParameter: a token is outside the vocabulary.
            OutOfRange: the draft model has no room for the text.
            BadStructure: the structure of the output cannot be compiled.
        """
        token_ids = token_ids_from_proto(committed, self.model.vocab_size, "committed_token_ids")
        check_fits(len(token_ids), self.model, "committed_token_ids")
        spec = DraftSessionSpec(
            session_id,
            token_ids,
            num_prompt_tokens,
            sampling,
            speculation,
            self.model.vocab_size,
            begins_paused=begins_paused,
            prefix_salt=prefix_salt,
            matcher=None if structure is None else self.grammars.matcher(structure),
        )
        self._sessions.add(session_id)
        self._engine.open(spec, listener)

    def commit(self, session_id: str, token_ids: Sequence[TokenId], acknowledged_node_id: int) -> None:
        """Appends committed tokens.

        Args:
            session_id: Names the session.
            token_ids: Tokens from the verifier.
            acknowledged_node_id: Latest node that the verifier had by then.

        Raises:
            InvalidParameter: A token is outside the vocabulary.
        """
        checked = token_ids_from_proto(token_ids, self.model.vocab_size, "chunk.token_ids")
        self._engine.commit(session_id, checked, acknowledged_node_id)

    def steer(self, session_id: str, steering: Steering) -> None:
        """Applies the verifier's steering to a session."""
        self._engine.steer(session_id, steering)

    def close(self, session_id: str) -> None:
        """Ends a session. Idempotent."""
        self._sessions.discard(session_id)
        self._engine.close(session_id)

    def stop(self) -> None:
        """Ends the engine's thread; waits for it."""
        self._engine.stop()


def check_fits(num_tokens: int, model: LoadedModel, field: str) -> None:
    """Raises OutOfRange if a draft model has no room for a text of so many tokens, in its context or in its pool."""
    room = min(model.max_context_len, model.runner.pool.num_slots - model.runner.pool.block_size)
    if num_tokens >= room:
        raise OutOfRange(
            f"{field}: {num_tokens} tokens leave no room in the draft model's context of {model.max_context_len} "
            f"tokens or in its pool of keys and values, {room} tokens at most"
        )
