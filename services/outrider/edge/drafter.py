"""The draft model at work: a speculator's engine, without a speculator's port.

Everything that needs torch is imported from here on, and this file only once the port is open: torch takes seconds to
import, and an application need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import TokenId
from outrider.edge.settings import EdgeSettings
from outrider.models.loading import LoadedModel, UnknownModel, load_model
from outrider.models.runner import UnsupportedModel
from outrider.models.threads import set_num_threads
from outrider.rpc.convert import token_ids_from_proto
from outrider.rpc.errors import OutOfRange
from outrider.rpc.server import CannotLoad
from outrider.speculator.counts import DraftCounts
from outrider.speculator.drafting import DraftingSpec
from outrider.speculator.engine import DraftSink, Engine


class Drafter:
    """Grows trees for the generations of this edge. Every method may be called from the event loop."""

    def __init__(self, model: LoadedModel, settings: EdgeSettings) -> None:
        self.model = model
        self._max_num_sessions = settings.max_num_sessions
        self._sessions: set[str] = set()
        # An accelerator has no other tenants in its caches.
        keep_warm_s = settings.keep_warm_ms / 1e3 if settings.device == "cpu" else 0.0
        self._engine = Engine(model, prefill_chunk=settings.prefill_chunk, keep_warm_s=keep_warm_s)

    @property
    def has_room(self) -> bool:
        """Whether one more generation can be drafted for."""
        return len(self._sessions) < self._max_num_sessions

    @property
    def counts(self) -> DraftCounts:
        """What the engine has counted."""
        return self._engine.counts

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values right now."""
        return self._engine.num_sessions

    def open(
        self,
        session_id: str,
        committed: Sequence[TokenId],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        speculation: SpeculationParams,
        sink: DraftSink,
    ) -> None:
        """Begins a session.

        Raises:
            InvalidParameter: a token is outside the vocabulary.
            OutOfRange: the draft model's context is too short.
        """
        token_ids = token_ids_from_proto(committed, self.model.vocab_size, "committed_token_ids")
        if len(token_ids) >= self.model.max_context_len:
            raise OutOfRange(
                f"{len(token_ids)} tokens leave no room in the draft model's context of {self.model.max_context_len}"
            )
        spec = DraftingSpec(session_id, token_ids, num_prompt_tokens, sampling, speculation, self.model.vocab_size)
        self._sessions.add(session_id)
        self._engine.open(spec, sink)

    def commit(self, session_id: str, token_ids: Sequence[TokenId], acknowledged_node_id: int) -> None:
        """The target has spoken; the node is the latest that had arrived before. Raises InvalidParameter for a token
        outside the vocabulary."""
        checked = token_ids_from_proto(token_ids, self.model.vocab_size, "chunk.token_ids")
        self._engine.commit(session_id, checked, acknowledged_node_id)

    def steer(
        self, session_id: str, speculation: SpeculationParams | None, forward_us: int, round_trip_us: int
    ) -> None:
        """Goes on as the verifier says (`outrider.core.steering`)."""
        self._engine.steer(session_id, speculation, forward_us, round_trip_us)

    def close(self, session_id: str) -> None:
        """Ends a session. Idempotent."""
        self._sessions.discard(session_id)
        self._engine.close(session_id)

    def stop(self) -> None:
        """Ends the engine's thread; waits for it."""
        self._engine.stop()


def load_draft_model(settings: EdgeSettings) -> LoadedModel:
    """Loads the draft model; takes seconds. Raises CannotLoad."""
    set_num_threads(settings.num_threads or len(settings.cores))
    try:
        return load_model(settings.model, dtype=settings.dtype, device=settings.device)
    except (UnknownModel, UnsupportedModel, OSError) as error:
        raise CannotLoad(f"--model {settings.model}: {error}") from error
