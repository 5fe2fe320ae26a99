"""The prompts of the methods' suite: whether the models know them, what a replay asks, what is in a prior."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.demo.training.corpus import load_corpus
from outrider_bench.suites.methods.prior import (
    check_prompts,
    digest_of_training,
    longest_shared_run,
    other_prompts,
    runs_of,
)
from outrider_bench.suites.methods.prompts import CODE, code
from outrider_bench.suites.methods.replay import NEAR, NEW, replay_requests
from outrider_cli.prompts import default_prompts


def test_a_replay_begins_with_new_requests_and_asks_again_what_was_asked_before() -> None:
    requests = replay_requests(60, 20)
    assert len(requests) == 60
    assert {request.category for request in requests[:20]} == {NEW}
    near = [(index, request.text) for index, request in enumerate(requests) if request.category == NEAR]
    assert 5 <= len(near) <= 40
    for index, text in near:
        earlier = [request.text for request in requests[:index] if request.category == NEW]
        assert any(other.endswith(text) and other != text for other in earlier)
    new = [request.text for request in requests if request.category == NEW]
    assert len(set(new)) == len(new)
    assert replay_requests(60, 20) == requests


def test_a_replay_asks_for_nothing_that_the_models_were_trained_on() -> None:
    heldout = [source.text for source in load_corpus().heldout]
    assert all(any(request.text in text for text in heldout) for request in replay_requests(30, 20))


def test_code_is_what_ships_and_then_more_of_the_same_kind() -> None:
    prompts = code(16)
    shipped = [prompt for prompt in default_prompts() if prompt.category == CODE]
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
def test_the_prompts_of_the_benchmark_are_not_in_the_training_text_and_others_would_be_found() -> None:
    learned = load_corpus().train[100].text
    found = check_prompts([prompt.text for prompt in default_prompts()])
    if not found.is_same_library:
        pytest.skip("the library of this Python is not that of the training: a prompt may be in its text")
    assert (found.num_prompts, found.num_in_training_text, found.num_from_learned_files) == (24, 0, 0)
    assert check_prompts([learned[:400], "something that nobody ever wrote into a library"]).num_in_training_text == 1


def test_another_library_than_that_of_the_training_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digest_of_training() is not None
    monkeypatch.setattr("outrider_bench.suites.methods.prior.digest_of_training", lambda: "0" * 64)
    found = check_prompts(["nothing"])
    assert not found.is_same_library
    assert any("not that of the training" in sentence for sentence in found.sentences)


def test_the_prompts_of_the_prior_are_others_than_those_that_are_measured() -> None:
    texts = other_prompts(8)
    assert len(set(texts)) == 8
    assert not set(texts) & {prompt.text for prompt in default_prompts()}
    learned = [source.text for source in load_corpus().train]
    assert all(any(text in source for source in learned) for text in texts)


def test_runs_in_common_are_found_up_to_a_limit() -> None:
    ours, theirs = [[1, 2, 3, 4, 5]], [[9, 2, 3, 4], [5, 6]]
    assert runs_of(ours, 3) == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}
    assert longest_shared_run(ours, theirs, 10) == 3
    assert longest_shared_run(ours, theirs, 2) == 2
    assert longest_shared_run([[1, 2]], [[3, 4]], 10) == 0


@given(st.text("ab", max_size=12), st.text("ab", max_size=12), st.integers(1, 14))
def test_the_longest_run_in_common_is_that_of_all_comparisons(ours: str, theirs: str, limit: int) -> None:
    runs = (ours[start:end] for start in range(len(ours)) for end in range(start, len(ours) + 1))
    longest = max((len(run) for run in runs if run in theirs), default=0)
    first, second = ([ord(letter) for letter in text] for text in (ours, theirs))
    assert longest_shared_run([first], [second], limit) == min(longest, limit)
