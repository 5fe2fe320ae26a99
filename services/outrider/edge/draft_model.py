"""The draft model of an edge. It loads in the background: generations do not wait for it, and go on without it if
loading fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from outrider.core.statistics import Absence
from outrider.edge.settings import EdgeSettings
from outrider.models.threads import in_own_thread
from outrider.v1 import types_pb2, verifier_pb2

if TYPE_CHECKING:
    # They import torch, which takes seconds: the loading thread imports them, and the port is served meanwhile.
    from outrider.models.loading import LoadedModel
    from outrider.speculator.drafter import Drafter

log = structlog.get_logger(__name__)


class DraftModel:
    """The draft model of an edge, which may not be loaded yet, or never: `why_not` must be asked before `drafter` is
    used.

    A class of its own, so that a collaboration cannot be begun with a model that is not loaded.
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
            announce: Called with a line when the model is loaded, or cannot be.
        """
        self.drafter = None if model is None else _drafter(model, settings)
        """None while the model loads, and always if that fails."""
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
            # Not in that thread, which goes on when `close` cancels this task: the engine would not be stopped.
            drafter = loaded if isinstance(loaded, str) else _drafter(loaded, self._settings)
        except Exception as error:
            # Generations go on without drafts, so the process need not end.
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
        """Returns the kind of reason that `why_not` describes."""
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
        """Describes the draft model in the form of a verifier's speculator."""
        reason = self.why_not(target)
        return verifier_pb2.PeerInfo(address="edge", connected=not reason, last_error=reason)

    async def close(self) -> None:
        """Ends the engine's thread. A model that still loads is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.drafter is not None:
            await asyncio.to_thread(self.drafter.stop)


def _drafter(model: LoadedModel, settings: EdgeSettings) -> Drafter:
    from outrider.speculator.drafter import Drafter

    return Drafter(model, settings, loop=asyncio.get_running_loop())


def _load_model(settings: EdgeSettings) -> LoadedModel | str:
    """Loads the model in the calling thread; returns the reason if the settings do not allow it."""
    import outrider.speculator.drafter  # noqa: F401 - a third of a second, which `_drafter` would take on the event loop
    from outrider.models.loading import CannotLoadModel, load_for

    try:
        model = load_for(settings)
    except CannotLoadModel as error:
        return str(error)
    model.runner.make_loop()
    return model
