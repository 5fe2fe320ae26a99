"""The draft model of an edge. It loads in the background: generations do not wait for it, and go on without it if it
cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from outrider.core.blocks import PoolState, PrefixScope
from outrider.core.params import SamplingParams, SpeculationParams, Steering
from outrider.core.statistics import Absence
from outrider.core.structure import Structure
from outrider.core.tree import TokenId
from outrider.edge.settings import EdgeSettings
from outrider.models.threads import in_own_thread
from outrider.security.callers import current_tenant
from outrider.speculator.metrics import DraftCounts
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.errors import OutOfRange

if TYPE_CHECKING:
    # They import torch, which takes seconds: that happens in the thread that loads, and the port is served meanwhile.
    from outrider.models.loading import LoadedModel
    from outrider.speculator.engine import DraftListener

log = structlog.get_logger(__name__)


class DraftModel:
    """The draft model of an edge, which may not be there yet, or never: `why_not` tells before `drafter` is used.

    A class beside `Drafter`, so that a collaboration cannot be begun with a model that is not loaded.
    """

    def __init__(
        self,
        settings: EdgeSettings,
        on_loaded: Callable[[], None] = lambda: None,
        model: LoadedModel | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            settings: Names the model.
            on_loaded: Called on the event loop once the model is ready.
            model: The model, if it is loaded already; `start` does nothing then.
            announce: Takes a line when the model is there, or cannot be had.
        """
        self.drafter = None if model is None else Drafter(model, settings)
        """Stays None while the model loads, and for ever if that fails."""
        self._why_missing = "the draft model is loading"
        self._settings = settings
        self._on_loaded, self._announce = on_loaded, announce
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to load."""
        if self.drafter is None:
            self._task = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            loaded = await in_own_thread(lambda: _load_model(self._settings))
            # Not in that thread, which loads on when `close` cancels this: nobody would stop the engine.
            drafter = loaded if isinstance(loaded, str) else Drafter(loaded, self._settings)
        except Exception as error:
            # Generations go on without drafts, so this is no reason for the process to end.
            self._why_missing = f"the draft model cannot be loaded: {error}"
            log.exception("edge.draft_model_failed")
            self._announce(f"draft model: cannot be loaded: {error}")
            return
        if isinstance(drafter, str):
            self._why_missing = drafter
            log.error("edge.draft_model_failed", reason=drafter)
            self._announce(f"draft model: {drafter}")
            return
        self.drafter = drafter
        log.info("edge.draft_model_loaded", model=self.drafter.model.model_id)
        self._announce(f"draft model: {self.drafter.model.model_id} is loaded")
        self._on_loaded()

    def absence(self, target: types_pb2.ModelInfo) -> Absence:
        """Returns the kind of the reason that `why_not` gives in words."""
        if self.drafter is None:
            is_loading = self._task is None or not self._task.done()
            return Absence.STARTING if is_loading else Absence.UNUSABLE
        return Absence.UNUSABLE if self.drafter.model.tokenizer_hash != target.tokenizer_hash else Absence.FULL

    def why_not(self, target: types_pb2.ModelInfo) -> str:
        """Returns why nothing can be drafted for this target now; empty means that it can."""
        drafter = self.drafter
        if drafter is None:
            return self._why_missing
        model = drafter.model
        if model.tokenizer_hash != target.tokenizer_hash:
            return (
                f"tokenizer_hash must be {target.tokenizer_hash} ({target.model_id}), got {model.tokenizer_hash} "
                f"({model.model_id}): the token ids of the two models do not mean the same"
            )
        return "" if drafter.has_room else "all sessions of the draft model are in use"

    def peer_info(self, target: types_pb2.ModelInfo) -> verifier_pb2.PeerInfo:
        """Describes the draft model as a verifier describes its speculator."""
        reason = self.why_not(target)
        return verifier_pb2.PeerInfo(address="edge", connected=not reason, last_error=reason)

    async def close(self) -> None:
        """Ends the engine's thread. A model that still loads is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.drafter is not None:
            await asyncio.to_thread(self.drafter.stop)


class Drafter:
    """Grows draft trees for the generations of this edge. Every method may be called from the event loop."""

    def __init__(self, model: LoadedModel, settings: EdgeSettings) -> None:
        from outrider.models.structure import Grammars
        from outrider.models.text import TextCodec

        self.model = model
        self.codec = TextCodec(model.tokenizer)
        """Makes tokens of bad words as the target does, whose tokenizer is the same."""
        self.grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        """Compiles the structures of outputs."""
        self._max_num_sessions = settings.max_num_sessions
        # Kept here besides the engine's own, which change on its thread and later than a call of `reserve` or `close`.
        self._sessions: set[str] = set()
        from outrider.speculator.engine import Engine

        self._engine = Engine(
            model,
            prefill_chunk=settings.prefill_chunk,
            keep_warm_s=settings.keep_warm_s,
            prefix_scope=PrefixScope(settings.prefix_scope),
        )

    @property
    def has_room(self) -> bool:
        """True if one more generation can be drafted for."""
        return len(self._sessions) < self._max_num_sessions

    @property
    def counts(self) -> DraftCounts:
        """Counts of the engine."""
        return self._engine.counts

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values right now."""
        return self._engine.num_sessions

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
    ) -> None:
        """Begins a session whose room is reserved.

        Raises:
            InvalidParameter: a token is outside the vocabulary.
            OutOfRange: the draft model's context is too short.
            BadStructure: the structure of the output cannot be compiled.
        """
        from outrider.speculator.session import DraftSessionSpec

        token_ids = token_ids_from_proto(committed, self.model.vocab_size, "committed_token_ids")
        if len(token_ids) >= self.model.max_context_len:
            raise OutOfRange(
                f"{len(token_ids)} tokens leave no room in the draft model's context of {self.model.max_context_len}"
            )
        spec = DraftSessionSpec(
            session_id,
            token_ids,
            num_prompt_tokens,
            sampling,
            speculation,
            self.model.vocab_size,
            prefix_salt=f"caller {current_tenant() or ''}",
            matcher=None if structure is None else self.grammars.matcher(structure),
        )
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
        """Goes on with a session as the verifier says."""
        self._engine.steer(session_id, steering)

    def close(self, session_id: str) -> None:
        """Ends a session. Idempotent."""
        self._sessions.discard(session_id)
        self._engine.close(session_id)

    def stop(self) -> None:
        """Ends the engine's thread; waits for it."""
        self._engine.stop()


def _load_model(settings: EdgeSettings) -> LoadedModel | str:
    """Loads the model in the thread that it is called in; returns the reason where the settings do not allow it."""
    import outrider.speculator.engine  # noqa: F401 - a third of a second, which `Drafter` would take on the event loop
    from outrider.models.loading import CannotLoadModel, load_for

    try:
        return load_for(settings)
    except CannotLoadModel as error:
        return str(error)
