"""Settings for all tests."""

from __future__ import annotations

import signal
import time

import pytest
import structlog
import torch
from hypothesis import settings

# A shell without job control starts background commands with SIGINT ignored. Python keeps that, and so does every
# process that is started from here. Tests interrupt those, and this one: a handler here is SIG_DFL after their exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests share their cores with the services that they start: a second torch thread would mostly wait.
torch.set_num_threads(1)

# By default structlog renders the locals of all frames with rich: seconds for an exception that a service logs.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

BEGAN = time.monotonic()

# Other load on the machine is no property of the code.
settings.register_profile("outrider", deadline=None)
settings.load_profile("outrider")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="samples as large as the claims need, not only as finds a known wrong rule"
    )
    parser.addoption(
        "--begin-within", type=float, default=float("inf"), metavar="MINUTES", help="skips tests that would begin later"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGAN > 60 * item.config.getoption("--begin-within"):
        pytest.skip("no time was left: --begin-within")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True if samples are to be large."""
    return bool(request.config.getoption("--full"))
