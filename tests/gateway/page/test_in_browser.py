"""The page in a real browser shows what the API sent, also without a mouse, and however fast it comes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.page.fake_gateway import FAST, RACE, FakeGateway, running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
CHROMIUM = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
pytestmark = [
    pytest.mark.suite,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install it, or name it in OUTRIDER_CHROMIUM"),
]
DONE = "body[data-state=done]"
USUAL_GAP_MS, LONGEST_GAP_MS = 100, 1000
"""Milliseconds between two frames, of half of them and of all, that do not count as a freeze on shared cores."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    with playwright.sync_playwright() as driver:
        # Root can run Chromium only without its sandbox.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def gateway() -> Iterator[tuple[FakeGateway, str]]:
    with running() as started:
        yield started


@pytest.fixture
def page(browser: Any, gateway: tuple[FakeGateway, str]) -> Iterator[Any]:
    """The open page; any complaint of its console, policy or network fails the test."""
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 500 else None)
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', e => console.error('policy', e.blockedURI))"
    )
    page.goto(gateway[1])
    page.wait_for_function("() => document.querySelector('#model').textContent !== ''")
    yield page
    context.close()
    # A request that was refused on purpose is in the console, too.
    refusals = "400 (Bad Request)", "401 (Unauthorized)"
    assert [text for text in complaints if not any(refusal in text for refusal in refusals)] == []


def recorded() -> dict[str, Any]:
    race: dict[str, Any] = json.loads(RACE.read_text(encoding="utf-8"))
    return race


def text_of(lane: dict[str, Any]) -> str:
    return "".join(event["choices"][0]["text"] for _, event in lane["events"] if event["choices"])


def shown(page: Any) -> dict[str, Any]:
    """What the page shows after a race: texts, colours, and numbers that do not depend on a clock."""
    found: dict[str, Any] = page.evaluate(
        """() => ({
            texts: [0, 1].map(side => document.querySelector(`#text-${side}`).textContent),
            colours: [0, 1].map(side => [...document.querySelectorAll(`#text-${side} .token`)].map(t => t.className)),
            numbers: document.querySelector("#numbers").textContent,
            round: document.querySelector("#round-words").textContent,
        })"""
    )
    return found


def test_the_spans_are_the_text_and_the_colours_its_sources(page: Any) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    assert page.text_content("#headline").startswith("The same text, ")
    seen = shown(page)
    for side, lane in enumerate(recorded()["lanes"]):
        assert seen["texts"][side] == text_of(lane)
        accepted = lane["events"][-1][1]["speculation"]["accepted_by_source"]
        colours = seen["colours"][side]
        assert sum("from-draft" in colour for colour in colours) == accepted.get("draft", 0)
        assert sum("from-target" not in colour for colour in colours) == sum(accepted.values())


def test_a_race_needs_no_mouse(page: Any) -> None:
    page.focus("#prompt")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "go":
            break
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    page.focus("#text-1")
    page.keyboard.press("End")
    assert "probability" in page.text_content("#card")
    page.keyboard.press("Enter")
    num_rounds = len(
        [
            1
            for _, event in recorded()["lanes"][1]["events"]
            if event["choices"][:1] and "speculation" in event["choices"][0]
        ]
    )
    page.wait_for_function("n => document.querySelector('#round').value === String(n - 1)", arg=num_rounds)
    page.focus("#round")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "n => document.querySelector('#round-words').textContent.startsWith(`Round ${n - 1} `)", arg=num_rounds
    )


def test_the_tree_of_each_round_keeps_the_tokens_of_the_round(page: Any) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    rounds = [
        e["choices"][0]["speculation"]
        for _, e in recorded()["lanes"][1]["events"]
        if e["choices"] and "speculation" in e["choices"][0]
    ]
    rounds = [speculation for speculation in rounds if speculation.get("round")]
    for index, speculation in enumerate(rounds):
        page.evaluate(
            "i => { const s = document.querySelector('#round'); s.value = i; s.dispatchEvent(new Event('input')); }",
            index,
        )
        page.wait_for_function(
            "i => document.querySelector('#round-words').textContent.startsWith(`Round ${i + 1} `)", arg=index
        )
        assert page.locator("#tree .box.kept").count() == speculation["round"]["num_accepted"]
        assert (
            page.locator("#tree .box.refused").count()
            == len(speculation["tree"]["parents"]) - speculation["round"]["num_accepted"]
        )
        assert page.locator("#tree .box.own").count() == 1


def test_what_was_saved_shows_the_same_when_it_is_opened(page: Any, tmp_path: Path) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    before = shown(page)
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "race.json")
    page.reload()
    page.set_input_files("#open", tmp_path / "race.json")
    page.wait_for_selector(DONE)
    assert shown(page) == before


def test_one_file_plays_a_recording_without_a_server(browser: Any, tmp_path: Path) -> None:
    from outrider_gateway.page.standalone import standalone

    (tmp_path / "demo.html").write_text(standalone(RACE.read_text(encoding="utf-8")), encoding="utf-8")
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "demo.html").as_uri())
    page.wait_for_selector(DONE)
    assert shown(page)["texts"] == [text_of(lane) for lane in recorded()["lanes"]]
    assert all(url.startswith(("data:", "file:")) for url in requests)
    page.close()


def test_a_conversation_goes_on_turn_by_turn(page: Any, gateway: tuple[FakeGateway, str]) -> None:
    gateway[0].is_chat = True
    page.reload()
    page.wait_for_selector("#json-label:visible")
    assert page.locator("#example option").all_text_contents() == ["Write", "Explain", "JSON"]
    page.select_option("#example", "JSON")
    question = page.input_value("#prompt")
    page.click("#go")
    page.wait_for_selector(DONE)
    page.click("#reply")
    answer = text_of(recorded()["lanes"][1])
    assert page.locator("#turns li").all_text_contents() == [question, answer]
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "And a dog?")
    page.uncheck("#json")
    page.click("#go")
    page.wait_for_selector("body[data-state=running]")
    page.wait_for_selector(DONE)
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    first, second = gateway[0].bodies[0], gateway[0].bodies[-1]
    assert (first["messages"], first["response_format"]) == (said[:1], {"type": "json_object"})
    assert second["messages"] == [*said, {"role": "user", "content": "And a dog?"}]
    assert "response_format" not in second
    page.click("#fresh")
    assert page.locator("#turns li").count() == 0
    assert page.input_value("#prompt") == question


def test_a_killed_draft_model_leaves_the_text_as_it_is(page: Any, gateway: tuple[FakeGateway, str]) -> None:
    page.click("#go")
    page.click("#kill")
    page.wait_for_selector(DONE)
    assert gateway[0].lab["speculator"] == "killed"
    assert shown(page)["texts"][1] == text_of(recorded()["lanes"][1])
    page.wait_for_selector("#kill:disabled")
    gateway[0].lab["speculator"] = "running"
    page.wait_for_function("() => !document.querySelector('#kill').disabled")


def test_a_stream_that_was_read_to_its_end_has_not_failed(page: Any) -> None:
    ends: list[str | None] = []
    page.on("requestfinished", lambda request: ends.append(None) if "/v1/" in request.url else None)
    page.on("requestfailed", lambda request: ends.append(request.failure) if "/v1/" in request.url else None)
    num_streams = 12
    page.evaluate(
        """async count => {
            const { generate, requestOf } = await import("/page/api.js");
            const settings = { prompt: "x", temperature: 0, seed: 1, maxTokens: 64, model: "m" };
            for (let i = 0; i < count; i++) for await (const event of generate(requestOf(settings, "auto"))) ;
        }""",
        num_streams,
    )
    while len(ends) < num_streams:
        page.evaluate("new Promise(requestAnimationFrame)")
    assert ends == [None] * num_streams


def test_a_refused_request_is_told_in_words_at_the_form(page: Any) -> None:
    page.fill("#temperature", "3")
    page.click("#go")
    page.wait_for_selector("#problem:not([hidden])")
    assert page.text_content("#problem") == "temperature must be at most 2"
    assert page.evaluate("document.activeElement.id") == "temperature"


def test_both_requests_differ_in_the_method_alone(page: Any, gateway: tuple[FakeGateway, str]) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    left, right = sorted(gateway[0].bodies, key=lambda body: body["speculation"]["method"], reverse=True)
    assert (left.pop("speculation"), right.pop("speculation")) == ({"method": "off"}, {"method": "auto"})
    assert left == right


def test_a_chat_is_asked_and_shown_as_one(page: Any, gateway: tuple[FakeGateway, str]) -> None:
    page.check("#chat")
    page.click("#go")
    page.wait_for_selector(DONE)
    prompt = page.input_value("#prompt")
    assert [body["messages"] for body in gateway[0].bodies] == [[{"role": "user", "content": prompt}]] * 2
    assert all("prompt" not in body and body["logprobs"] is True for body in gateway[0].bodies)
    assert shown(page)["texts"] == [text_of(lane) for lane in recorded()["lanes"]]
    assert "/v1/chat/completions" in page.text_content("#curl")
    page.hover("#text-1 .token >> nth=0")
    assert "probability" in page.text_content("#card")


@pytest.mark.parametrize("code", ["curl", "python"])
def test_copied_code_is_the_code_that_is_shown(page: Any, code: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#prompt", 'it\'s "copied"\n')
    page.click(f".copy[data-of={code}]")
    page.wait_for_function("() => document.querySelector('#status').textContent === 'Copied.'")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.text_content(f"#{code}")
    assert "copied" in copied


def test_a_recording_that_is_dropped_plays(page: Any) -> None:
    files = page.evaluate_handle(
        """text => {
            const files = new DataTransfer();
            files.items.add(new File([text], "race.json", { type: "application/json" }));
            return files;
        }""",
        RACE.read_text(encoding="utf-8"),
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": files})
    assert page.evaluate("document.body.classList.contains('dropping')")
    page.dispatch_event("body", "drop", {"dataTransfer": files})
    assert not page.evaluate("document.body.classList.contains('dropping')")
    page.wait_for_selector(DONE)
    assert shown(page)["texts"] == [text_of(lane) for lane in recorded()["lanes"]]


def test_a_token_goes_to_the_server_and_nowhere_else(
    page: Any, gateway: tuple[FakeGateway, str], tmp_path: Path
) -> None:
    page.fill("#key", "secret-of-mine")
    page.click("#go")
    page.wait_for_selector(DONE)
    assert gateway[0].authorizations == ["Bearer secret-of-mine"] * 2
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "race.json")
    assert "secret" not in (tmp_path / "race.json").read_text(encoding="utf-8")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
    assert "secret" not in page.content()


def test_a_server_that_wants_a_token_tells_its_load_once_it_has_one(
    page: Any, gateway: tuple[FakeGateway, str]
) -> None:
    gateway[0].token = "secret-of-mine"
    try:
        page.reload()
        page.wait_for_function("() => document.querySelector('#load').textContent.includes('the token is wrong')")
        page.fill("#key", gateway[0].token)
        page.press("#key", "Tab")
        page.wait_for_function("() => document.querySelector('#load').textContent.includes('1 of 64')")
    finally:
        gateway[0].token = ""


def test_the_speeds_are_a_chart_and_a_table(page: Any) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    assert page.locator("#speeds .speed-line").count() == 2
    assert "off: 64 tokens in " in page.text_content("#speeds desc")
    assert page.locator("#speed-table tr").count() == 11
    assert page.locator("#speed-table th").all_text_contents() == ["Second", "off", "auto"]
    page.click("summary")
    assert page.locator("#speed-table").is_visible()


def test_each_round_says_what_auto_chose_for_it_and_what_that_means(page: Any) -> None:
    page.click("#go")
    page.wait_for_selector(DONE)
    methods = [
        e["choices"][0]["speculation"]["round"]["method"]
        for _, e in recorded()["lanes"][1]["events"]
        if e["choices"][:1] and e["choices"][0].get("speculation", {}).get("round")
    ]
    chosen = page.locator("#choices li")
    assert sorted(chosen.all_text_contents()) == sorted(f"{name} ×{methods.count(name)}" for name in set(methods))
    assert "most probable guesses" in chosen.first.get_attribute("title")
    page.hover("#bars", position={"x": 4, "y": 90})
    assert page.get_attribute("#bars", "title").startswith(f"Round 1: {methods[0]}, ")


def test_a_recording_without_times_of_drafts_says_so(page: Any) -> None:
    page.set_input_files("#open", RACE)
    page.wait_for_selector(DONE)
    assert "no times of drafts for each round" in page.text_content("#times-words")


def test_every_control_is_in_reach_of_a_thumb(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.set_input_files("#open", RACE)
    page.wait_for_selector(DONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    found = page.evaluate(
        """() => [...document.querySelectorAll("button, select, textarea, summary, input")]
            .filter(each => each.checkVisibility())
            // A box to tick is as large as its label, and so is the one that opens files.
            .map(each => ["checkbox", "radio", "file"].includes(each.type) ? each.closest("label") : each)
            .map(each => {
                each.scrollIntoView({ block: "center" });
                const { left, right, top, bottom, width, height } = each.getBoundingClientRect();
                const hit = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
                return { name: each.id || each.textContent.trim(), left, right, width, height,
                         isHit: each.contains(hit) || hit.contains(each) };
            })"""
    )
    names = {each["name"] for each in found}
    assert {"go", "kill", "save", "pause", "round", "theme", "Open a race", "As a chat"} <= names
    for control in found:
        assert control["left"] >= 0, control
        assert control["right"] <= 390, control
        assert min(control["width"], control["height"]) >= 40, control
        assert control["isHit"], control


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, scheme: str) -> None:
    axe = os.environ.get("OUTRIDER_AXE")
    if axe is None:
        pytest.skip("no axe-core: OUTRIDER_AXE names its axe.min.js")
    page.emulate_media(color_scheme=scheme)
    page.reload()
    page.click("#go")
    page.wait_for_selector(DONE)
    page.evaluate(Path(axe).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert [(violation["id"], violation["help"]) for violation in found["violations"]] == []


@pytest.mark.parametrize("width", [320, 390, 820, 1440])
def test_nothing_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_two_hundred_rounds_a_second_do_not_freeze_it(page: Any) -> None:
    page.evaluate(
        """() => {
            window.longest = 0;
            new PerformanceObserver(list => {
                for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
            }).observe({ type: "longtask" });
            window.gaps = [];
            let before = performance.now();
            const frame = now => { window.gaps.push(now - before); before = now; requestAnimationFrame(frame); };
            requestAnimationFrame(frame);
        }"""
    )
    page.fill("#prompt", FAST)
    page.click("#go")
    page.wait_for_selector(DONE)
    assert page.locator("#text-1 .token").count() > 4000
    gaps = sorted(page.evaluate("window.gaps"))
    assert gaps[len(gaps) // 2] < USUAL_GAP_MS
    assert gaps[-1] < LONGEST_GAP_MS
    assert page.evaluate("window.longest") < LONGEST_GAP_MS
