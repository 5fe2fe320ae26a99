"""An error of one session in a step ends that session alone, with its own error; the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from outrider.core.params import SamplingParams
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import SpeculationParams
from outrider_client.client import Client
from outrider_client.errors import Internal
from tests.support.services import RunningVerifier, running_verifier, target_model
from tests.support.waiting import until

PROMPT = "def add(a, b):\n"
POISON = 77
"""A token that this tokenizer cannot decode."""
ROWS = target_model().runner.vocab_size


class FailingTokenizer:
    """The target's tokenizer, which fails at one token."""

    def __init__(self) -> None:
        self._tokenizer = target_model().tokenizer
        self.backend_tokenizer = self
        self.num_failed = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer.backend_tokenizer, name)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        if POISON in token_ids:
            self.num_failed += 1
            raise ValueError("no such character")
        return str(self._tokenizer.backend_tokenizer.decode(token_ids, **options))


@pytest.fixture
def tokenizer() -> FailingTokenizer:
    return FailingTokenizer()


@pytest.fixture
async def verifier(tokenizer: FailingTokenizer) -> AsyncIterator[RunningVerifier]:
    # More tokens than the head has rows, as if tokens were added to a tokenizer alone.
    async with running_verifier(model=replace(target_model(), tokenizer=tokenizer, vocab_size=ROWS + 2)) as running:
        yield running


@pytest.fixture
async def client(verifier: RunningVerifier) -> AsyncIterator[Client]:
    async with Client(verifier.address) as connected:
        yield connected


POISONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text that cannot be decoded": (PROMPT, {"logit_bias": {POISON: 100.0}, "stop": ["never"]}),
    "a prompt beyond the model's rows": ([5, ROWS + 1], {}),
    "a bias beyond the model's rows": (PROMPT, {"logit_bias": {ROWS + 1: 100.0}}),
    "a bad word beyond the model's rows": (PROMPT, {"bad_words_token_ids": [[ROWS]]}),
}


@pytest.mark.parametrize("name", POISONS)
async def test_a_request_that_breaks_its_part_of_a_step_fails_alone_and_once(
    verifier: RunningVerifier, client: Client, name: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 48, "temperature": 0.8, "seed": 3, "ignore_eos": True, "method": "off"}
    expected = await client.complete(PROMPT, **options)
    beside = [asyncio.create_task(client.complete(PROMPT, resume=False, stop=["never"], **options)) for _ in range(3)]
    await until(lambda: verifier.engine.num_sessions == 3)
    num_begun = sum(verifier.servicer.counts.sessions.values())
    prompt, poison = POISONS[name]
    with pytest.raises(Internal):
        await client.complete(prompt, **{**options, **poison})
    # Not tried again: that would fail in the same way.
    assert sum(verifier.servicer.counts.sessions.values()) == num_begun + 1
    assert [each.text for each in await asyncio.gather(*beside)] == [expected.text] * 3
    assert await verifier.is_idle()
    assert not verifier.engine.fault()


class Listener:
    """Listens to a generation, and may fail at its second verdict."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.verdicts: list[Verdict] = []
        self.failures: list[bool] = []

    def on_verdict(self, verdict: Verdict, *_: object) -> None:
        self.verdicts.append(verdict)
        if self._fails and len(self.verdicts) == 2:
            raise MemoryError

    def on_failure(self, is_own: bool) -> None:
        self.failures.append(is_own)

    def on_admitted(self, num_cached_tokens: int) -> None: ...


async def test_who_cannot_take_a_verdict_keeps_nobody_else_from_theirs(verifier: RunningVerifier) -> None:
    listeners = [Listener(fails=number == 1) for number in range(4)]
    for number, listener in enumerate(listeners):
        sampling, speculation = SamplingParams(seed=1), SpeculationParams()
        spec = SessionSpec(f"{number}", (1, 2, 3), sampling, speculation, vocab_size=ROWS, max_tokens=12)
        verifier.engine.open(spec, cast(Any, listener))
    others = [listener for listener in listeners if listener is not listeners[1]]
    await until(lambda: all(each.verdicts and each.verdicts[-1].finish_reason for each in others))
    # Another verifier may have the memory that this one lacked.
    assert listeners[1].failures == [False]
    assert not any(each.failures for each in others)
