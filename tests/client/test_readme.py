"""The examples of clients/README.md, run against real services."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_cli.local.stack import LocalStack, StackConfig

README = Path(__file__).parents[2] / "clients" / "README.md"
ADDRESS, HTTP_ADDRESS = "127.0.0.1:50051", "127.0.0.1:8000"
MODEL = "demo/target-100m"
"""Name of the model in the examples."""
EXAMPLES = [
    (re.sub(r"\W+", "-", heading.lower()), code)
    for heading, code in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", README.read_text(), re.M | re.S
    )
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A verifier with a speculator and a gateway; its target is small, and in the number format in which texts
    agree."""
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        datastore=False,
        gateway=True,
        gateway_arguments=("--served-model-name", MODEL),
        log_folder=tmp_path_factory.mktemp("logs"),
    )
    with LocalStack(config) as running:
        yield running


def test_there_are_nine_examples() -> None:
    assert len(EXAMPLES) == 9
    assert README.read_text().count("```python") == 9


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[name for name, _ in EXAMPLES])
async def test_an_example_runs_as_it_stands(code: str, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    source = code.replace(ADDRESS, stack.address).replace(HTTP_ADDRESS, stack.gateway_address)
    assert source != code
    program = compile(source, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(program, {})
    if running is not None:  # the block awaits
        await running
    assert len(capsys.readouterr().out) > 10
