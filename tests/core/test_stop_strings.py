"""Stop strings are found where they first end, wherever the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.stop_strings import StopStrings

texts = st.text(alphabet="abc", max_size=20)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def by_definition(text: str, strings: list[str], *, includes_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if includes_stop else end - len(longest)], longest
    return text, None


@given(text=texts, strings=stops, cuts=st.sets(st.integers(0, 20)), includes_stop=st.booleans())
def test_where_the_text_is_cut_decides_nothing(
    text: str, strings: list[str], cuts: set[int], includes_stop: bool
) -> None:
    watched = StopStrings(strings, includes_stop=includes_stop)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    decided = ""
    for begin, end in pairwise(bounds):
        decided += watched.feed(text[begin:end])
        # Decided text never changes: a possible stop string is held back until it is known to be none.
        assert by_definition(text, strings, includes_stop=includes_stop)[0].startswith(decided)
        if watched.found is not None:
            break
    decided += "" if watched.found is not None else watched.finish()
    assert (decided, watched.found) == by_definition(text, strings, includes_stop=includes_stop)


tokens = st.lists(st.tuples(st.sampled_from(["a", "b", "ab", "<x>", "<xy>"]), st.booleans()), max_size=8)
tagged = st.lists(st.sampled_from(["a", "ab", "<x>", "<xy>", "a<x>", "<x><xy>", "<x>b", "x", ">", "b<"]), min_size=1)


@given(tokens=tokens, strings=tagged, includes_stop=st.booleans())
def test_a_string_may_have_special_tokens_that_are_left_out_and_does_not_end_within_one(
    tokens: list[tuple[str, bool]], strings: list[str], includes_stop: bool
) -> None:
    watched = StopStrings(strings, ["<x>", "<xy>"], includes_stop=includes_stop)
    signs = {"<x>": "1", "<xy>": "2"}
    told = whole = decided = ""
    for text, is_special in tokens:
        is_special &= text in signs
        decided += watched.feed("", "", text) if is_special else watched.feed(text)
        told, whole = told + ("" if is_special else text), whole + (signs[text] if is_special else text)
        with_signs = [string.replace("<xy>", "2").replace("<x>", "1") for string in strings]
        is_there = any(string in told or string in whole for string in strings)
        assert (watched.found is not None) == (is_there or any(string in whole for string in with_signs))
        if watched.found is not None:
            assert watched.found in strings
            assert told.startswith(decided.removesuffix(watched.found) if includes_stop else decided)
            return
    assert decided + watched.finish() == told


def test_a_string_may_span_a_special_token_and_what_is_told() -> None:
    for stop in ("b<x>c", "<x>", "bc"):
        watched = StopStrings([stop], ["<x>"])
        decided = [watched.feed("ab"), watched.feed("", "", "<x>"), "" if watched.found else watched.feed("cd")]
        assert (watched.found, "".join(decided)) == (stop, "ab" if stop == "<x>" else "a")


def test_a_special_token_may_end_a_string_that_begins_in_an_outlook() -> None:
    watched = StopStrings(["\n<x>"], ["<x>"])
    assert (watched.feed("a"), watched.feed("", "\n"), watched.feed("", "\n", "<x>")) == ("a", "", "")
    assert watched.found == "\n<x>"


@given(text=texts, strings=stops)
def test_only_what_may_become_a_stop_is_held_back(text: str, strings: list[str]) -> None:
    watched = StopStrings(strings)
    decided = watched.feed(text)
    if watched.found is None:
        held = text[len(decided) :]
        assert not held or any(string.startswith(held) for string in strings)


def test_a_string_that_ends_too_early_is_passed_over() -> None:
    watched = StopStrings(["ab", "bx"])
    assert watched.feed("1ab", may_stop=False) == "1a"  # the b may begin bx
    assert watched.feed("c ") == "bc "
    assert watched.feed("ab") == ""
    assert watched.found == "ab"
