"""The prompts of the papers' suite: code that the models do not know, and requests to a service in use."""

from __future__ import annotations

from importlib import resources

import pytest

from outrider.models.demo.training.corpus import load_corpus
from outrider_bench.papers.prompts import CODE, NEAR, NEW, code, replay_requests
from outrider_cli.prompts import load_prompts


def test_a_replay_begins_with_new_requests_and_asks_again_what_was_asked_before() -> None:
    requests = replay_requests(60, 20, 0.4)
    assert len(requests) == 60
    assert {request.category for request in requests[:20]} == {NEW}
    near = [(index, request.text) for index, request in enumerate(requests) if request.category == NEAR]
    assert 5 <= len(near) <= 40
    for index, text in near:
        earlier = [request.text for request in requests[:index] if request.category == NEW]
        assert any(other.endswith(text) and other != text for other in earlier)
    new = [request.text for request in requests if request.category == NEW]
    assert len(set(new)) == len(new)
    assert replay_requests(60, 20, 0.4) == requests


def test_a_replay_asks_for_nothing_that_the_models_were_trained_on() -> None:
    heldout = [source.text for source in load_corpus().heldout]
    assert all(any(request.text in text for text in heldout) for request in replay_requests(30, 20, 0.4))


def test_code_is_what_ships_and_then_more_of_the_same_kind() -> None:
    prompts = code(16)
    shipped = [prompt for prompt in load_prompts("demo") if prompt.category == CODE]
    assert list(prompts[:8]) == shipped
    assert code(12) == prompts[:12]
    assert code(3) == prompts[:3]
    assert len({prompt.text for prompt in prompts}) == 16
    assert {prompt.category for prompt in prompts} == {CODE}
    assert all(250 <= len(prompt.text) <= 450 and prompt.text.endswith(":\n") for prompt in prompts)


def test_further_code_is_of_held_out_files_that_no_other_prompt_is_of() -> None:
    heldout = [source.text for source in load_corpus().heldout]
    files = [next(place for place, text in enumerate(heldout) if one.text in text) for one in code(16)]
    assert len(set(files)) == 16


@pytest.mark.slow
def test_the_prompts_that_ship_are_not_in_the_training_text() -> None:
    corpus = load_corpus()
    card = resources.files("outrider.models.demo").joinpath("README.md").read_text(encoding="utf-8")
    if corpus.heldout_digest not in card:
        pytest.skip("the library of this Python is not that of the training: a prompt may be in its text")
    learned = "\n".join(source.text for source in corpus.train)
    assert not [prompt.text for prompt in load_prompts("demo") if prompt.text[-200:] in learned]
