"""A session that retrieves, and the callbacks that it gets."""

from __future__ import annotations

import asyncio

from outrider.core.params import RetrievalScope
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.statistics import Absence
from outrider.peers.datastore import EVERYTHING, DatastorePeer, RetrievalStream


class Listener:
    """Records a session's callbacks."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Continuation]] = []
        self.num_lost = 0
        self._heard = asyncio.Condition()

    def on_answer(self, base_len: int, continuation: Continuation) -> None:
        self.answers.append((base_len, continuation))

    def on_lost(self, absence: Absence) -> None:
        self.num_lost += 1
        self.absence = absence


def retrieve(
    peer: DatastorePeer,
    session_id: str,
    committed: list[int],
    listener: Listener,
    plan: RetrievalPlan | None = EVERYTHING,
) -> RetrievalStream:
    scope = RetrievalScope.SESSION
    return peer.retrieve(session_id, committed, scope, False, listener.on_answer, listener.on_lost, plan)
