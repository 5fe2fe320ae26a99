"""Counts of a draft engine: every node that it grows ends up committed or wasted."""

from __future__ import annotations

from outrider.core.methods import SPECULATIVE
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import Draft
from outrider.speculator.engine import Engine
from outrider.speculator.metrics import read_drafts
from outrider.speculator.service import SpeculatorService
from outrider.speculator.session import DraftSessionSpec
from outrider.speculator.settings import SpeculatorSettings
from outrider.version import __version__
from outrider_client.client import Client
from tests.support.metric_values import values_of
from tests.support.services import draft_model, running_speculator, running_verifier

PROMPT = "class TestParser(unittest.TestCase):\n    def test_"


async def test_nodes_are_committed_or_wasted_and_messages_and_time_are_counted() -> None:
    async with (
        running_speculator() as speculator,
        running_verifier(speculator=speculator.address) as verifier,
        Client(verifier.address) as client,
    ):
        accepted = (
            await client.complete(PROMPT, seed=2, max_tokens=48, method="speculative")
        ).summary.num_accepted_tokens
        assert (await client.info()).speculator.connected
        for method in ("speculative", "pearl", "best-first"):
            result = await client.complete(PROMPT, seed=3, max_tokens=48, ignore_eos=True, method=method)
            accepted += result.summary.num_accepted_tokens
        assert await verifier.is_idle()
        assert await speculator.is_idle()
        values = values_of(speculator.servicer.metrics())
        received = values_of(verifier.servicer.metrics())["outrider_wire_bytes_total"]["speculator,received"]
    number = {
        name.removeprefix("outrider_draft_").removesuffix("_total"): value[""]
        for name, value in values.items()
        if "" in value
    }
    assert number["nodes"] == number["committed_tokens"] + number["wasted_tokens"]
    assert number["nodes"] >= number["sent_nodes"] > 0
    assert number["committed_tokens"] >= accepted > 0
    assert number["proposals"] <= number["sent_nodes"] < received
    assert (number["sessions"], number["sessions_active"]) == (4, 0)
    # Before the connection stands, or while the machine is busy, a session runs alone. Drafting then starts at its
    # current position.
    assert number["resyncs"] <= number["sessions"]
    steps = values["outrider_draft_step_duration_seconds"]
    assert steps["count"] > 0
    assert steps["sum"] <= number["busy_seconds"]


class Nobody:
    """Discards drafts."""

    def send(self, draft: Draft) -> None: ...

    def fail(self) -> None:
        raise AssertionError("the engine failed")


def test_a_session_that_begins_with_output_is_a_resync() -> None:
    engine = Engine(draft_model())
    params = SpeculationParams(SPECULATIVE, num_speculative_tokens=3, lookahead=3)
    for name, num_prompt_tokens in (("new", 4), ("again", 3)):
        vocab_size = draft_model().vocab_size
        spec = DraftSessionSpec(name, (5, 6, 7, 8), num_prompt_tokens, SamplingParams(seed=1), params, vocab_size)
        engine.open(spec, Nobody())
        engine.commit(name, (9,))
    engine.close("new")
    engine.stop()
    values = values_of(read_drafts(engine.counts, engine.num_sessions, engine.residency.state()))
    assert (values["outrider_draft_sessions_total"][""], values["outrider_draft_resyncs_total"][""]) == (2, 1)
    assert values["outrider_draft_commits_total"][""] == 2
    assert values["outrider_draft_sessions_active"][""] == 1


async def test_there_is_nothing_to_say_of_an_engine_that_loads() -> None:
    values = values_of(SpeculatorService(SpeculatorSettings(model="demo/draft")).metrics())
    assert list(values["outrider_build_info"]) == [
        ",".join(("speculator", __version__, "demo/draft", "float32", "cpu", "none"))
    ]
    assert not any(name.startswith("outrider_draft_") for name in values)
