"""Grammars compiled for a tokenizer: what they allow, what they refuse, and what they cost at most."""

from __future__ import annotations

import json
import threading
import time
from functools import cache
from typing import Any

import pytest
import torch

from outrider.core.structure import Structure, StructureBroken, StructureKind
from outrider.models.structure import MAX_DESCRIPTION_BYTES, BadStructure, GrammarMatcher, Grammars, masked
from tests.support.chat_templates import with_tokens
from tests.support.services import target_model


@cache
def grammars() -> Grammars:
    model = target_model()
    return Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)


def tokens(text: str) -> list[int]:
    return list(target_model().tokenizer(text, add_special_tokens=False)["input_ids"])


def allows(structure: Structure, text: str) -> bool:
    """Whether a text is allowed as a whole."""
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
        (Structure(StructureKind.REGEX, "[a-c]+[0-9]{2}"), "abc42", "abc4"),
        (Structure(StructureKind.GRAMMAR, 'start: "x" ("," "x")*'), "x,x", "x,"),
        (Structure(StructureKind.GRAMMAR, 'root ::= "x" ("," "x")*'), "x,x,x", "xx"),
        (Structure(StructureKind.CHOICE, json.dumps(["yes", "no (really?)", "a.b"])), "no (really?)", "axb"),
    ],
)
def test_a_description_allows_what_it_says(structure: Structure, good: str, bad: str) -> None:
    assert allows(structure, good)
    assert not allows(structure, bad)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure(StructureKind.JSON, "{nonsense"), "cannot be read|does not compile"),
        (Structure(StructureKind.JSON, '{"type": "strng"}'), "does not compile: Invalid type: strng"),
        (Structure(StructureKind.JSON, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Structure(StructureKind.REGEX, "(a"), "unclosed group"),
        (Structure(StructureKind.GRAMMAR, "start: thing"), 'unknown name: "thing"'),
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
    return with_tokens(ADDED).convert_ids_to_tokens(mask.nonzero()[:, 0].tolist())  # type: ignore[no-any-return]


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
        said.append(int(matcher.mask().nonzero()[-1]))
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
            token_id = int(matcher.mask().nonzero()[0])
            if matcher.is_over or not matcher.consume(token_id):
                break
    except (BadStructure, StructureBroken):
        pass  # refused: that is what limits are for
    assert time.process_time() - started < 10


def test_only_allowed_tokens_are_drawn_and_padding_never() -> None:
    matcher = grammars().matcher(Structure(StructureKind.CHOICE, '["yes","no"]'))
    logits = torch.zeros(1, target_model().vocab_size + 8)
    row = masked(logits, matcher)
    allowed = (row > -torch.inf).nonzero()[:, 1].tolist()
    assert {target_model().tokenizer.decode([token_id]) for token_id in allowed} <= {"y", "ye", "yes", "n", "no"}
    # Others have forbidden all of them: the grammar leaves no choice.
    logits[:, allowed] = -torch.inf
    assert (masked(logits, matcher) > -torch.inf).nonzero()[:, 1].tolist() == allowed


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
    assert all(torch.equal(first.mask(), other.mask()) for other in others)
