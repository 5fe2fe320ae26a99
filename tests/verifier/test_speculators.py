"""A verifier with several speculators: the text does not depend on the drafter, and a move loses nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.peers import fleet as fleets
from outrider.peers.fleet import SpeculatorFleet
from outrider.server.settings import parse_settings
from outrider.verifier.settings import VerifierSettings
from outrider_client.client import Client
from tests.support.services import RunningSpeculator, RunningVerifier, running_speculator, running_verifier

pytestmark = pytest.mark.slow

PROMPT = "class TestQueue(unittest.TestCase):\n    def test_"
Running = tuple[RunningVerifier, RunningSpeculator, RunningSpeculator]


@pytest.fixture(autouse=True)
def only_the_tests_look_at_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "TEND_S", 3600.0)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with (
        running_speculator() as one,
        running_speculator() as other,
        running_verifier(speculator=f"{one.address}, {other.address}") as verifier,
    ):
        yield verifier, one, other


def fleet_of(verifier: RunningVerifier) -> SpeculatorFleet:
    serving = verifier.servicer._serving
    assert serving is not None
    assert serving.speculators is not None
    return serving.speculators


@pytest.mark.parametrize("method", ["speculative", "pearl", "best-first", "auto"])
async def test_a_text_whose_session_is_moved_on_the_way_is_the_same_and_nothing_was_lost(
    running: Running, method: str
) -> None:
    verifier, one, other = running
    fleet = fleet_of(verifier)
    async with Client(verifier.address) as client:
        plain = await client.complete(PROMPT, seed=5, max_tokens=200, ignore_eos=True, method="off")
        generation = client.generate(PROMPT, seed=5, max_tokens=200, ignore_eos=True, method=method)
        has_asked = False
        async for chunk in generation:
            drafting = [peer for peer in fleet.peers if peer.load.num_own_sessions]
            if not has_asked and drafting and chunk.num_drafted:
                [origin] = drafting
                origin.load.report(10, 16)
                fleet.balance()
                has_asked = True
        result = generation.result
    assert result.token_ids == plain.token_ids
    if method != "auto":  # which may have chosen to run without drafts
        assert fleet.num_moves == 1
        assert one.engine.counts.num_opened == other.engine.counts.num_opened == 1
    assert (result.summary.num_speculator_losses, result.summary.degraded) == (0, False)


async def test_the_server_describes_each_speculator(running: Running) -> None:
    verifier, one, other = running
    async with (
        Client(verifier.address) as client,
        client.generate(PROMPT, seed=1, max_tokens=200, method="pearl", ignore_eos=True) as generation,
    ):
        async for chunk in generation:
            if chunk.num_drafted:
                break
        info = await client.info()
    assert [each.address for each in info.speculators] == [one.address, other.address]
    assert sorted((each.num_own_sessions, each.num_sessions) for each in info.speculators) == [(0, 0), (1, 1)]
    [drafting] = [each for each in info.speculators if each.num_own_sessions]
    assert drafting.connected
    assert drafting.max_num_sessions == 16
    assert info.speculator in info.speculators


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("a:1,,b:2", "must be HOST:PORT, or several separated by commas, without an empty one"),
        ("a:1, a:1", "must name each speculator once"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(value: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(VerifierSettings, ["--speculator", value, "--peer-insecure"])
    assert f"error: --speculator (or OUTRIDER_VERIFIER_SPECULATOR): {rule}, got {value!r}" in capsys.readouterr().err
