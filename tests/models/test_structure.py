"""Grammars compiled for a tokenizer: what they allow, what they refuse, and what they cost at most."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.params import SamplingParams, Source
from outrider.core.structure import Structure, StructureBroken, StructuredText, StructureKind
from outrider.core.tree import DraftTree
from outrider.models.acceptance import Round, emitted
from outrider.models.draws import DrawnTokens
from outrider.models.sampling import Sampler
from outrider.models.structure import (
    MANY_ALLOWED,
    MAX_DESCRIPTION_BYTES,
    BadStructure,
    GrammarMatcher,
    Grammars,
    draw_allowed,
    mask_row,
)
from tests.support.chat_templates import with_tokens
from tests.support.services import target_model
from tests.support.trees import add_path


@cache
def grammars() -> Grammars:
    model = target_model()
    return Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)


def tokens(text: str) -> list[int]:
    return list(target_model().tokenizer(text, add_special_tokens=False)["input_ids"])


def allows(structure: Structure, text: str) -> bool:
    """True if a text is allowed as a whole."""
    matcher = grammars().matcher(structure)
    return all(matcher.consume(token_id) for token_id in tokens(text)) and (
        matcher.is_over or matcher.consume(target_model().eos_token_ids[0])
    )


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Structure(StructureKind.JSON, SCHEMA), '{"a":12}', '{"a":"12"}'),
        (Structure(StructureKind.JSON_OBJECT, ""), '{"x":[1,null]}', "[1]"),
        (Structure(StructureKind.JSON, " true"), '["any",{"value":1}]', "any"),
        (Structure(StructureKind.REGEX, "[a-c]+[0-9]{2}"), "abc42", "abc4"),
        (Structure(StructureKind.GRAMMAR, 'start: "x" ("," "x")*'), "x,x", "x,"),
        (Structure(StructureKind.GRAMMAR, 'root ::= "x" ("," "x")*'), "x,x,x", "xx"),
        (Structure(StructureKind.CHOICE, json.dumps(["yes", "no (really?)", "a.b"])), "no (really?)", "axb"),
    ],
)
def test_a_description_allows_what_it_says(structure: Structure, good: str, bad: str) -> None:
    assert allows(structure, good)
    assert not allows(structure, bad)


DIGITS = Structure(StructureKind.REGEX, "[0-9]+", begins_after="</think>")


@pytest.mark.parametrize(
    "inner",
    [
        Structure(StructureKind.JSON, SCHEMA),
        Structure(StructureKind.JSON_OBJECT, ""),
        Structure(StructureKind.REGEX, '[{]"a":12[}]'),
        Structure(StructureKind.GRAMMAR, """start: "{" KEY ":12}"\nKEY: /"a"/"""),
        Structure(StructureKind.CHOICE, '["{\\"a\\":12}"]'),
    ],
    ids=lambda inner: inner.kind.value,
)
def test_every_kind_can_begin_to_hold_behind_a_text(inner: Structure) -> None:
    structure = replace(inner, begins_after='</th"in/k>')
    assert allows(structure, 'So ([{ "a"\n</th"in/k>{"a":12}')
    assert not allows(structure, 'So</th"in/k>\n{"a":12}')
    assert not allows(structure, '{"a":12}')


def test_a_text_may_not_end_before_that_behind_which_its_structure_begins() -> None:
    matcher = grammars().matcher(DIGITS)
    assert all(matcher.consume(token_id) for token_id in tokens("a thought"))
    assert not matcher.consume(target_model().eos_token_ids[0])
    mask = matcher.mask()
    assert not mask[target_model().eos_token_ids[0]]
    assert all(mask[token_id] for token_id in tokens("anything else, 12"))


def test_a_marker_that_begins_within_a_token_and_ends_within_another_is_found() -> None:
    # One token holds the marker's end and the text after it.
    structure = replace(DIGITS, begins_after="re")
    matcher, token_id = grammars().matcher(structure), tokens("return")
    assert len(token_id) == 1
    assert not matcher.consume(token_id[0])
    assert allows(replace(structure, text="turn"), "we return")


def test_a_marker_that_is_an_added_token_is_that_token() -> None:
    tokenizer = deepcopy(target_model().tokenizer)
    tokenizer.add_tokens(["</think>", "<tool>"])
    end, tool = tokenizer.convert_tokens_to_ids(["</think>", "<tool>"])
    matcher = Grammars(tokenizer, len(tokenizer), target_model().eos_token_ids).matcher(DIGITS)
    # Other added tokens belong to the thoughts, and so does the marker's text in other tokens.
    thoughts = [*tokens("call a"), tool, tool, *tokens("and </think>12")]
    assert all(matcher.consume(token_id) for token_id in [*thoughts, end])
    assert matcher.num_allowed(tokens("12")) == len(tokens("12"))
    assert not matcher.consume(tokens("a")[0])
    assert not matcher.consume(end)
    matcher.rollback(1)
    assert matcher.consume(tokens("a")[0])


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure(StructureKind.REGEX, "(a", begins_after="x"), "unclosed group"),
        (Structure(StructureKind.GRAMMAR, "start: thing", begins_after="x"), 'unknown name: "thing"'),
        (Structure(StructureKind.JSON, "{nonsense"), "cannot be read|does not compile"),
        (Structure(StructureKind.JSON, '{"type": "strng"}'), "does not compile: Invalid type: strng"),
        (Structure(StructureKind.JSON, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Structure(StructureKind.REGEX, "(a"), "unclosed group"),
        (Structure(StructureKind.GRAMMAR, "start: thing"), 'unknown name: "thing"'),
        (Structure(StructureKind.REGEX, r"[^\s\S]"), "^allows no text at all$"),
        (Structure(StructureKind.JSON, '{"$ref": "#"}'), "^allows no text at all$"),
        (Structure(StructureKind.JSON, "false"), "^allows no text at all$"),
        (Structure(StructureKind.GRAMMAR, r"start: /[^\s\S]/"), "^allows no text at all$"),
        (Structure(StructureKind.REGEX, "a" * (MAX_DESCRIPTION_BYTES + 1)), "must be at most 65536 bytes long"),
    ],
)
def test_a_description_that_is_none_is_refused_and_says_where(structure: Structure, words: str) -> None:
    with pytest.raises(BadStructure, match=words):
        grammars().matcher(structure)


ADDED = {"<tool>": False, "[TOOLS]": True}


@cache
def grammars_with_added_tokens() -> Grammars:
    return Grammars(with_tokens(ADDED), target_model().vocab_size, target_model().eos_token_ids)


def spellings(description: str, *, special_tokens_as_text: bool = False) -> list[str]:
    """The tokens with which a text may begin, as they are written."""
    structure = Structure(StructureKind.GRAMMAR, description, special_tokens_as_text)
    mask = grammars_with_added_tokens().matcher(structure).mask()
    return with_tokens(ADDED).convert_ids_to_tokens(np.flatnonzero(mask).tolist())  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", ["<tool>", "[TOOLS]"])
def test_a_token_counts_as_its_text_where_that_is_asked_for(text: str) -> None:
    either = f'start: "{text}x" | "y"'
    assert spellings(either) == sorted([text[0], "y"])
    assert set(spellings(either, special_tokens_as_text=True)) == {text[0], text, "y"}
    free = "start: /(?s:.*)/"
    assert text not in spellings(free)
    assert text in spellings(free, special_tokens_as_text=True)


@pytest.mark.parametrize("as_text", [False, True])
def test_an_end_is_no_text_and_comes_where_the_text_may_end(as_text: bool) -> None:
    assert "<|endoftext|>" in spellings("start: /(?s:.*)/", special_tokens_as_text=as_text)
    assert "<|endoftext|>" not in spellings("start: /(?s:.+)/", special_tokens_as_text=as_text)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("text", ["<tool>", "[TOOLS]", "a<tool>b", '["[TOOLS]"]'])
def test_a_text_that_is_forced_can_be_said_though_a_token_is_written_so(text: str, as_text: bool) -> None:
    structure = Structure(StructureKind.JSON, json.dumps({"const": text}), as_text)
    matcher, said = grammars_with_added_tokens().matcher(structure), list[int]()
    while not matcher.is_over:
        said.append(int(np.flatnonzero(matcher.mask())[-1]))
        assert matcher.consume(said[-1])
    said = [token_id for token_id in said if token_id not in target_model().eos_token_ids]
    assert json.loads(with_tokens(ADDED).decode(said)) == text
    forced = grammars_with_added_tokens().matcher(structure)
    assert all(forced.consume(token_id) for token_id in forced.forced())


def test_a_grammar_may_name_a_token_where_tokens_are_no_text() -> None:
    assert spellings('start: <tool> "x"') == ["<tool>"]
    with pytest.raises(BadStructure, match="unknown special token"):
        spellings('start: <tool> "x"', special_tokens_as_text=True)


def nested(depth: int) -> str:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"allOf": [inner, inner]}
    return json.dumps(inner)


def references(depth: int) -> str:
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, depth):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"type": "object", "properties": {str(i): below for i in range(10)}}
    return json.dumps({"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"})


BOMBS = {
    "nested": Structure(StructureKind.JSON, nested(10)),
    "references": Structure(StructureKind.JSON, references(30)),
    "deep": Structure(StructureKind.JSON, '{"items":' * 5000 + "{}" + "}" * 5000),
    "enum": Structure(StructureKind.JSON, json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
    "min length": Structure(StructureKind.JSON, '{"type": "string", "minLength": 1000000, "maxLength": 2000000}'),
    "min items": Structure(StructureKind.JSON, '{"type": "array", "minItems": 1000000, "items": {"type": "integer"}}'),
    "repeats": Structure(StructureKind.REGEX, "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"),
    "backtracking": Structure(StructureKind.REGEX, "(a+)+(b+)+(.*)*(.*)*x"),
    "states": Structure(StructureKind.REGEX, "(.*a.{30}){5}"),
    "alternatives": Structure(StructureKind.REGEX, "|".join(f".*{i}.*x{i}.*" for i in range(2000))),
    "ambiguous": Structure(StructureKind.GRAMMAR, 'start: e\ne: e e | e "+" e | "a" | ""\n'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_served_or_refused_within_seconds(name: str) -> None:
    started = time.process_time()
    try:
        matcher = grammars().matcher(BOMBS[name])
        for _ in range(20):
            matcher.mask()
            token_id = int(np.flatnonzero(matcher.mask())[0])
            if matcher.is_over or not matcher.consume(token_id):
                break
    except (BadStructure, StructureBroken):
        pass  # refused, as the limits require
    assert time.process_time() - started < 10


def test_only_allowed_tokens_are_drawn_and_padding_never() -> None:
    matcher = grammars().matcher(Structure(StructureKind.CHOICE, '["yes","no"]'))
    rows = torch.zeros(2, target_model().vocab_size + 8)
    mask_row(rows, 1, matcher)
    allowed = (rows[1] > -torch.inf).nonzero()[:, 0].tolist()
    assert {target_model().tokenizer.decode([token_id]) for token_id in allowed} <= {"y", "ye", "yes", "n", "no"}
    assert not rows[0].any(), "of one row"
    # Other filters have forbidden all of them, so the grammar alone decides.
    rows[0, allowed] = -torch.inf
    drawn = {draw_allowed(Sampler(), rows[:1], matcher, SamplingParams(seed=seed), 0) for seed in range(40)}
    assert drawn == set(allowed)
    mask_row(rows, 0, matcher)
    assert torch.equal(rows[0], rows[1])


STRUCTURES = {
    "one token": Structure(StructureKind.REGEX, "\n"),
    "few tokens": Structure(StructureKind.REGEX, "[a-c]{1,3}"),
    "half of them": Structure(StructureKind.REGEX, "[a-z ]{1,20}"),
    "nearly all": Structure(StructureKind.REGEX, "(?s:.*)"),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=1.0, seed=4, top_p=0.9),
        SamplingParams(temperature=1.3, seed=5, top_k=20, min_p=0.01),
    ],
)
def test_the_draw_is_that_of_a_model_which_says_nothing_else(name: str, params: SamplingParams) -> None:
    matcher, random = grammars().matcher(STRUCTURES[name]), torch.Generator().manual_seed(1)
    for index in range(20):
        logits = 3 * torch.randn(1, target_model().vocab_size, generator=random)
        token_id = draw_allowed(Sampler(), logits, matcher, params, index)
        row = logits.masked_fill(~torch.from_numpy(matcher.mask()), -torch.inf)
        assert [token_id] == Sampler().draw(row, [params], [index])


def test_few_and_many_allowed_tokens_are_both_tried() -> None:
    one, few, half, most = (int(grammars().matcher(each).mask().sum()) for each in STRUCTURES.values())
    assert 1 == one < few < MANY_ALLOWED < half < most


@pytest.mark.parametrize(("top_p", "num_sampled"), [(0.9, 2), (1.0, 4)])
def test_where_no_draw_counts_before_the_mask_only_rows_that_are_reached_are_drawn(
    top_p: float, num_sampled: int
) -> None:
    params = SamplingParams(seed=1, top_p=top_p)
    sampled: list[int] = []

    class CountingSampler(Sampler):
        def begin(
            self,
            logits: torch.Tensor,
            params: Sequence[SamplingParams],
            output_indices: Sequence[int],
            rows: torch.Tensor | None = None,
        ) -> DrawnTokens:
            sampled.extend(index for each, index in zip(params, output_indices, strict=True) if not each.is_greedy)
            return super().begin(logits, params, output_indices, rows)

    random = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(4, target_model().vocab_size, generator=random)
    matcher = grammars().matcher(STRUCTURES["nearly all"])
    first = draw_allowed(Sampler(), logits[:1], matcher, params, 5)
    tree = DraftTree((1,), target_model().vocab_size)
    # The first drafted token is right; the others follow a wrong one.
    add_path(tree, 1, [first, 7, 7], -1.0, Source.DRAFT)
    nodes = tree.best_chain(3)
    round_ = Round(params, [5, 6, 7, 8], nodes=nodes, structured=StructuredText(matcher, tree))
    (draws,) = emitted(CountingSampler(), logits, [round_])
    assert draws[0] == first
    assert draws[1] == draw_allowed(Sampler(), logits[1:2], _behind(first), params, 6) != 7
    assert sampled == [5, 6, 7, 8][:num_sampled]


def _behind(token_id: int) -> GrammarMatcher:
    matcher = grammars().matcher(STRUCTURES["nearly all"])
    assert matcher.consume(token_id)
    return matcher


def test_forced_text_is_spelled_as_the_tokenizer_does() -> None:
    matcher = grammars().matcher(Structure(StructureKind.JSON, SCHEMA))
    assert matcher.forced() == tokens('{"a":')[: len(matcher.forced())]
    assert len(matcher.forced()) >= 2


def test_each_matcher_stands_alone_and_any_thread_may_ask() -> None:
    structure = Structure(StructureKind.REGEX, "[a-z]{5}")
    found: list[GrammarMatcher] = []
    threads = [threading.Thread(target=lambda: found.append(grammars().matcher(structure))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = found
    assert first.consume(tokens("abc")[0])
    first.rollback(1)
    assert all(np.array_equal(first.mask(), other.mask()) for other in others)
