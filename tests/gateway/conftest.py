"""A fake verifier, listening, and gateways: one in front of it, and one in front of a real verifier that knows
tools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.chat_templates import HERMES, model_with_template
from tests.support.fake_verifier import FakeVerifier, verifier
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import running_verifier

__all__ = ["verifier"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    """The gateway of a real verifier, whose template knows tools and says how their calls are written."""
    async with running_verifier(model=model_with_template(HERMES)) as real, running_gateway(real.address) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def scripted(verifier: FakeVerifier) -> AsyncIterator[RunningGateway]:
    async with running_gateway(verifier.address) as running:
        yield running
