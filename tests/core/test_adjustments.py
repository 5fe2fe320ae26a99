"""Changes of a row's logits that depend on the tokens before it, however many of those are committed or drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.adjustments import Adjustment, TextAdjustments
from outrider.core.params import InvalidParameter, SamplingParams, Source
from outrider.core.tree import DraftTree
from tests.support.trees import add_path

VOCAB_SIZE = 6
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


def as_dict(adjustment: Adjustment) -> tuple[dict[int, float], set[int]]:
    """The amounts to subtract, by token, and the forbidden tokens."""
    pairs = zip(adjustment.seen_token_ids.tolist(), adjustment.subtrahends.tolist(), strict=True)
    found = dict(pairs)
    assert len(found) == len(adjustment.seen_token_ids)  # each once
    return found, set(adjustment.forbidden_token_ids.tolist())


def by_definition(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> tuple[dict[int, float], set[int]]:
    counts = Counter(output)
    taken = {
        token: params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        for token in {*prompt, *output}
    }
    text, forbidden = [*prompt, *output], set[int]()
    for word in params.bad_words_token_ids:
        if text[len(text) - len(word) + 1 :] == list(word[:-1]) and len(text) >= len(word) - 1:
            forbidden.add(word[-1])
    if len(output) < params.min_tokens:
        forbidden |= set(params.stop_token_ids)
    return taken, forbidden


@given(
    prompt=token_lists.filter(bool),
    committed=st.lists(token_lists, max_size=3),
    path=token_lists,
    phrase=token_lists,
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=4),
    min_tokens=st.integers(0, 6),
)
def test_a_row_sees_committed_tokens_and_its_own_path(
    prompt: list[int],
    committed: list[list[int]],
    path: list[int],
    phrase: list[int],
    words: list[tuple[int, ...]],
    min_tokens: int,
) -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words_token_ids=tuple(words),
        min_tokens=min_tokens,
        stop_token_ids=(4, 5),
    )
    tree = DraftTree(prompt, VOCAB_SIZE)
    adjustments = TextAdjustments(params, tree, len(prompt))
    output: list[int] = []
    for tokens in committed:
        assert as_dict(adjustments.behind(tree.root)) == by_definition(params, prompt, output)
        tree.commit(tokens)
        output += tokens
    tip = add_path(tree, len(tree.committed), path, -1.0, Source.DRAFT) if path else tree.root
    assert tip is not None
    found = as_dict(adjustments.behind(tip, phrase))
    assert found == by_definition(params, prompt, [*output, *path, *phrase])


def test_without_penalties_no_token_is_counted() -> None:
    tree = DraftTree([1, 2], VOCAB_SIZE)
    adjustment = TextAdjustments(SamplingParams(logit_bias=((3, 2.0),)), tree, 2).behind(tree.root)
    assert adjustment.seen_token_ids.size == 0
    assert (adjustment.bias_token_ids.tolist(), adjustment.bias.tolist()) == ([3], [2.0])


def test_a_long_text_of_many_tokens_is_counted_whole() -> None:
    tree = DraftTree([0], 1000)
    adjustments = TextAdjustments(SamplingParams(frequency_penalty=1.0), tree, 1)
    tree.commit([*range(1000), *range(500)])
    taken, _ = as_dict(adjustments.behind(tree.root))
    assert np.bincount([int(count) for count in taken.values()]).tolist() == [0, 500, 500]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty must be finite and > 0, got 0.0"),
        ({"repetition_penalty": float("inf")}, "sampling.repetition_penalty must be finite"),
        ({"repetition_penalty": float("nan")}, "sampling.repetition_penalty must be finite"),
        ({"presence_penalty": float("nan")}, r"sampling.presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": 2.1}, r"sampling.frequency_penalty must be in \[-2, 2\]"),
        ({"logit_bias": ((7, 101.0),)}, r"sampling.logit_bias\[7\] must be in \[-100, 100\], got 101.0"),
        ({"logit_bias": ((7, float("nan")),)}, r"sampling.logit_bias\[7\] must be in"),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "sampling.logit_bias must be of at most 1024 tokens"),
        ({"min_tokens": -1}, "sampling.min_tokens must be >= 0"),
        ({"bad_words_token_ids": ((),)}, r"sampling.bad_words_token_ids\[0\] must be 1 to 64 tokens"),
        ({"bad_words_token_ids": ((1,),) * 513}, "sampling.bad_words_token_ids must be at most 512 words"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        SamplingParams(**fields)  # type: ignore[arg-type]
