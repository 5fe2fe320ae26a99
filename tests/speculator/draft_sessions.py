"""Sessions of the speculator's engine: how one is opened, what it is sent, and what it should be sent."""

from __future__ import annotations

import queue

from outrider.core.methods import SPECULATIVE
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import Draft
from outrider.models.runner import Segment
from outrider.models.sampling import Sampler
from outrider.speculator.session import DraftSessionSpec
from tests.support.services import draft_model

PROMPT = tuple(range(100, 130))
SAMPLING = SamplingParams(seed=9, temperature=0.7)


class Collector:
    """Collects what a session is sent."""

    def __init__(self) -> None:
        self.drafts: queue.Queue[Draft] = queue.Queue()

    def send(self, draft: Draft) -> None:
        assert draft.forward_us > 0
        self.drafts.put(draft)

    def fail(self) -> None:
        raise AssertionError("the engine failed")


def spec(session_id: str) -> DraftSessionSpec:
    speculation = SpeculationParams(SPECULATIVE, num_speculative_tokens=3, lookahead=3)
    return DraftSessionSpec(session_id, PROMPT, len(PROMPT), SAMPLING, speculation, draft_model().vocab_size)


def expected_chain(committed: tuple[int, ...]) -> list[int]:
    """Three tokens, each from a fresh forward over everything before it."""
    runner, tokens = draft_model().runner, list(committed)
    for _ in range(3):
        logits = runner.forward([Segment(runner.new_cache(), tokens, 1)])
        tokens.append(Sampler().candidates(logits, [SAMPLING], [len(tokens) - len(PROMPT)], 1)[0][0][0])
    return tokens[len(committed) :]
