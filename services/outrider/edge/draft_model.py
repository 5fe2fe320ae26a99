"""The draft model on its way: generations do not wait for it, and go on without it if it cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from outrider.edge.settings import EdgeSettings
from outrider.rpc.server import CannotLoad
from outrider.v1 import types_pb2, verifier_pb2

if TYPE_CHECKING:  # it imports torch, see there
    from outrider.edge.drafter import Drafter
    from outrider.models.loading import LoadedModel

log = structlog.get_logger(__name__)


class DraftModel:
    """Loads in the background; `drafter_for` says whether it can be used."""

    def __init__(self, settings: EdgeSettings, on_loaded: Callable[[], None] = lambda: None) -> None:
        """`on_loaded` is called on the event loop once it is ready."""
        self.drafter: Drafter | None = None
        """None while it loads, and for ever if that fails."""
        self._why_missing = "the draft model is loading"
        self._settings = settings
        self._on_loaded = on_loaded
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to load."""
        self._task = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            # In a thread, the import of torch included: the port is served meanwhile.
            model = await asyncio.to_thread(_load, self._settings)
        except CannotLoad as error:
            self._why_missing = str(error)
            log.error("edge.draft_model_failed", reason=str(error))
            return
        except Exception as error:
            self._why_missing = f"the draft model cannot be loaded: {error}"
            log.exception("edge.draft_model_failed")
            return
        from outrider.edge.drafter import Drafter

        self.drafter = Drafter(model, self._settings)
        log.info("edge.draft_model_loaded", model=model.model_id)
        self._on_loaded()

    def why_not(self, target: types_pb2.ModelInfo) -> str:
        """Why nothing can be drafted for this target now; empty = it can."""
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
        """The draft model as a verifier describes its speculator."""
        reason = self.why_not(target)
        return verifier_pb2.PeerInfo(address="edge", connected=not reason, last_error=reason)

    async def close(self) -> None:
        """Ends its thread; what loads still is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.drafter is not None:
            await asyncio.to_thread(self.drafter.stop)


def _load(settings: EdgeSettings) -> LoadedModel:
    from outrider.edge.drafter import load_draft_model

    return load_draft_model(settings)
