"""A fleet under load: texts are the same whichever process is killed meanwhile, and each process gets its share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from outrider_cli.local.stack import LocalStack
from outrider_client.generation import Result
from tests.e2e.fleet import NUM_AT_ONCE, NUM_TEXTS, begun_since, generated, num_begun, running_fleet, unevenness

# Five services with models, and hundreds of texts.
pytestmark = [pytest.mark.suite, pytest.mark.timeout(300)]

MAX_UNEVENNESS = 0.2
"""All texts begin at once."""
MAX_UNEVENNESS_OF_TURNS = 0.5
"""Each text that ends makes room for the next, so a process that happens to be faster gets more."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A fleet of its own, because its parts get hurt."""
    with running_fleet(tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def plain(stack: LocalStack) -> list[Result]:
    """The texts without faults and without drafts."""
    return asyncio.run(generated(stack, methods=("off",)))


def texts_of(results: list[Result]) -> list[tuple[tuple[int, ...], str]]:
    return [(result.token_ids, result.text) for result in results]


@pytest.mark.parametrize(("num_at_once", "most"), [(NUM_TEXTS, MAX_UNEVENNESS), (NUM_AT_ONCE, MAX_UNEVENNESS_OF_TURNS)])
async def test_every_process_gets_its_share_of_the_sessions(
    stack: LocalStack, plain: list[Result], num_at_once: int, most: float
) -> None:
    before = num_begun(stack.verifiers), num_begun(stack.speculators)
    found = await generated(stack, methods=("pearl",), num_at_once=num_at_once)
    assert texts_of(found) == texts_of(plain)
    assert {result.num_resumes for result in found} == {0}
    verifiers = begun_since(before[0], stack.verifiers)
    speculators = begun_since(before[1], stack.speculators)
    assert sum(verifiers) == NUM_TEXTS
    assert unevenness(verifiers) <= most, verifiers
    assert unevenness(speculators) <= most, speculators


@pytest.mark.parametrize("name", ["speculator", "verifier-2"])
async def test_a_killed_process_changes_no_text_and_is_used_again_when_it_is_back(
    stack: LocalStack, plain: list[Result], name: str
) -> None:
    [hurt] = [process for process in (*stack.verifiers, *stack.speculators) if process.name == name]
    found = await generated(stack, hurt.kill)
    assert not hurt.is_running
    assert texts_of(found) == texts_of(plain)
    if hurt in stack.verifiers:
        assert any(result.num_resumes for result in found)
    hurt.restart()
    before = num_begun([hurt])
    assert texts_of(await generated(stack)) == texts_of(plain)
    assert begun_since(before, [hurt])[0] > 0


async def test_whichever_process_is_killed_no_text_changes(stack: LocalStack, plain: list[Result]) -> None:
    for hurt in (*stack.speculators, *stack.verifiers):
        assert texts_of(await generated(stack, hurt.kill)) == texts_of(plain), hurt.name
        hurt.restart()
