"""The page in a real browser, with real services, which it breaks: the texts stay the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
CHROMIUM = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.suite,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install it, or name it in OUTRIDER_CHROMIUM"),
]
NUM_TOKENS = 600


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The page of `outrider up`, which can break things."""
    command = [sys.executable, "-m", "outrider_cli", "up", "--target-dtype", "float32", "--lab"]
    command += ["--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("open "))
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("button", "pressed"), [("#kill", "Draft model: killed"), ("#delay", "Wire: 40 ms")], ids=["killed", "delayed"]
)
def test_what_is_broken_in_the_middle_of_a_race_leaves_the_texts_the_same(url: str, button: str, pressed: str) -> None:
    complaints: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.wait_for_function("() => document.querySelector('#model').textContent !== ''")
        page.wait_for_selector(f"{button}:enabled", timeout=60_000)
        page.fill("#tokens", str(NUM_TOKENS))
        page.select_option("#method-1", "pearl")
        page.click("#go")
        page.wait_for_function("() => document.querySelectorAll('#text-1 .token').length > 20")
        page.click(button)
        page.wait_for_function("text => document.body.innerText.includes(text)", arg=pressed)
        page.wait_for_selector("body[data-state=done]", timeout=120_000)
        assert page.text_content("#headline").startswith("The same text, ")
        assert f"All {NUM_TOKENS} tokens compared" in page.inner_text("body")
        assert page.text_content("#text-0") == page.text_content("#text-1")
        browser.close()
    assert complaints == []
