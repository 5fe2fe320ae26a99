"""A session's stream to a speculator, as the verifier opens and closes it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from outrider.core.methods import SPECULATIVE
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Absence
from outrider.core.tree import Draft
from outrider.peers.speculator import SpeculationSpec, SpeculatorPeer
from tests.support.services import running_speculator

pytestmark = pytest.mark.slow


class Nobody:
    """Ignores its callbacks."""

    def on_attached(self, forward_us: int) -> None: ...

    def on_draft(self, draft: Draft) -> None: ...

    def on_detached(self, absence: Absence) -> None: ...


async def test_a_stream_that_is_closed_leaves_no_session_whenever_that_is() -> None:
    async with running_speculator(max_num_sessions=400) as speculator:
        peer = SpeculatorPeer(speculator.address, speculator.model)
        spec = SpeculationSpec("s", 2, SamplingParams(), SpeculationParams(SPECULATIVE))
        gc.disable()  # it would eventually close a forgotten stream
        try:
            for num_steps in range(150):
                stream = peer.speculate(spec, [1, 2], Nobody())
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                stream.close()
            assert await speculator.is_idle()
        finally:
            gc.enable()
        await peer.state.close()
