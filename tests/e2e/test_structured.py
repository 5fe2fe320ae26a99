"""Structured output of the whole stack: always valid, and the text of `off` under every method."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outrider_client import Client, FinishReason, Result
from outrider_client.errors import InvalidArgument
from tests.support.schemas import random_schemas
from tests.support.variants import VARIANTS, options_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MAX_TOKENS = 400
SOME = ("pearl", "best-first tree", "retrieval", "auto", "double", "saguaro tree")


async def generate(client: Client, seed: int, temperature: float, variant: str, **given: Any) -> Result:
    options = {"max_tokens": MAX_TOKENS, **options_of(variant), **given}
    return await client.complete("# a record\nrecord = ", temperature=temperature, seed=seed, **options)


def said(result: Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.stop_token_id


async def test_every_output_obeys_its_schema_and_is_that_of_off(client: Client, full: bool) -> None:
    schemas = random_schemas(200 if full else 30, seed=1)
    limit = asyncio.Semaphore(8)

    async def run(number: int, temperature: float) -> None:
        schema = schemas[number]
        others = VARIANTS[1:] if full else (SOME[number % len(SOME)], SOME[(number + 1) % len(SOME)])
        async with limit:
            plain, *drafted = [
                await generate(client, number, temperature, variant, structured_outputs={"json": schema})
                for variant in ("off", *others)
            ]
        assert plain.finish_reason is FinishReason.STOP, schema
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(plain.text))]
        assert not errors, schema
        for variant, result in zip(others, drafted, strict=True):
            assert said(result) == said(plain), (variant, temperature, schema)
            assert not result.summary.degraded

    await asyncio.gather(*(run(number, temperature) for number in range(len(schemas)) for temperature in (0.0, 0.7)))


SUITE = os.environ.get("OUTRIDER_JSON_SCHEMA_SUITE", "")
"""A folder of tests of the JSON Schema test suite, which has one for each draft of the standard."""


def schemas_of_suite() -> list[dict[str, Any] | bool]:
    files = sorted((Path(SUITE) / "draft2020-12").glob("*.json"))
    return [group["schema"] for file in files for group in json.loads(file.read_text(encoding="utf-8"))]


@pytest.mark.suite
@pytest.mark.skipif(not SUITE, reason="OUTRIDER_JSON_SCHEMA_SUITE names no JSON Schema test suite")
async def test_each_schema_of_the_test_suite_is_obeyed_or_refused_by_name(client: Client, full: bool) -> None:
    schemas, limit, counts = schemas_of_suite()[:: 1 if full else 6], asyncio.Semaphore(8), Counter[str]()
    refusals: list[InvalidArgument] = []

    async def run(number: int, temperature: float) -> None:
        schema = schemas[number]
        variants = ("off", SOME[number % len(SOME)], SOME[(number + 1) % len(SOME)])
        given = {"structured_outputs": {"json": json.dumps(schema)}, "max_tokens": 120}
        async with limit:
            try:
                plain, *drafted = [await generate(client, number, temperature, each, **given) for each in variants]
            except InvalidArgument as error:
                refusals.append(error)
                return
        for variant, result in zip(variants[1:], drafted, strict=True):
            assert said(result) == said(plain), (variant, temperature, schema)
        counts[plain.finish_reason.name] += 1
        if plain.finish_reason is FinishReason.STOP:
            # As decimals: 200.6888 is a multiple of 0.0001; as floats it is not.
            validator = Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))
            validator.validate(json.loads(plain.text, parse_float=Decimal))

    await asyncio.gather(*(run(number, temperature) for number in range(len(schemas)) for temperature in (0.0, 0.7)))
    reasons = Counter(refusal.message.split(": ", 1)[-1][:60] for refusal in refusals)
    print(f"{len(schemas)} schemas at two temperatures: {dict(counts)}; refused: {dict(reasons)}")
    assert all(refusal.field == "structured_outputs.json" for refusal in refusals)
    assert all(re.search("does not compile|is too complex|cannot be read", refusal.message) for refusal in refusals)
    # Other schemas allow texts of any length, which a model of 5 M parameters does not end.
    assert counts["STOP"] > len(schemas) / 10


@pytest.mark.parametrize("variant", ["off", *SOME])
@pytest.mark.parametrize("filters", [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "repetition_penalty": 1.2}])
async def test_filters_and_penalties_come_with_a_structure(
    client: Client, variant: str, filters: dict[str, Any]
) -> None:
    given = {"structured_outputs": {"regex": "[a-z]{3,8}( [a-z]{2,6}){4}"}, **filters}
    plain = await generate(client, 3, 0.9, "off", **given)
    result = await generate(client, 3, 0.9, variant, **given)
    assert said(result) == said(plain)
    assert re.fullmatch("[a-z]{3,8}( [a-z]{2,6}){4}", result.text)


@pytest.mark.parametrize("variant", ["off", *SOME])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_structure_begins_behind_a_text_of_the_models_own(
    client: Client, variant: str, temperature: float
) -> None:
    structure = {"regex": "[a-z]{3,8}( [a-z]{2,6}){4}", "begins_after": "e"}
    filters = {"top_p": 0.9} if variant in SOME[::2] else {}
    plain = await generate(client, 3, temperature, "off", structured_outputs=structure, **filters)
    result = await generate(client, 3, temperature, variant, structured_outputs=structure, **filters)
    assert said(result) == said(plain)
    assert re.fullmatch(r"(?s)[^e]*e[a-z]{3,8}( [a-z]{2,6}){4}", result.text)


@pytest.mark.parametrize("method", ["speculative", "pearl", "saguaro", "double"])
async def test_under_the_ratio_rule_too_every_output_is_valid(client: Client, method: str) -> None:
    for seed, schema in enumerate(random_schemas(12, seed=2)):
        result = await generate(client, seed, 0.9, method, acceptance_rule="ratio", structured_outputs={"json": schema})
        Draft202012Validator(schema).validate(json.loads(result.text))


async def test_a_text_that_the_grammar_forces_takes_few_rounds(client: Client) -> None:
    schema = {"const": {"kind": "fixed", "values": [1, 2, 3], "note": "all of it is forced"}}
    plain = await generate(client, 0, 0.0, "off", structured_outputs={"json": schema})
    forced = await generate(client, 0, 0.0, "retrieval", structured_outputs={"json": schema})
    assert said(forced) == said(plain)
    assert forced.summary.num_rounds <= plain.summary.num_rounds / 3


async def test_a_structured_text_is_resumed_exactly(client: Client) -> None:
    given = {"structured_outputs": {"json": random_schemas(2, seed=1)[1]}}
    whole = await generate(client, 5, 0.7, "off", **given)
    for number in range(1, len(whole.token_ids) + 1, 3):
        rest = await generate(client, 5, 0.7, "pearl", resume_token_ids=whole.token_ids[:number], **given)
        assert (*whole.token_ids[:number], *rest.token_ids) == whole.token_ids
    with pytest.raises(InvalidArgument, match="resume_token_ids must be a beginning that"):
        await generate(client, 5, 0.7, "pearl", resume_token_ids=[5, 6, 7, 8, 9], **given)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        ({"json": "{"}, r"structured_outputs\.json"),
        ({"json": {"type": "strng"}}, r"structured_outputs\.json does not compile: Invalid type: strng"),
        ({"regex": "(a"}, r"structured_outputs\.regex does not compile: .*unclosed group"),
        ({"grammar": "start: thing"}, r"structured_outputs\.grammar does not compile: .*unknown name"),
        ({"choice": []}, r"structured_outputs\.choice\.choices must be 1 to 1024 texts"),
        ({"json_object": False}, r"structured_outputs\.json_object must be true"),
        ({"regex": "a", "begins_after": "x" * 257}, r"structured_outputs\.begins_after must be at most 256 bytes long"),
        ({"regex": "a" * 70_000}, r"structured_outputs\.regex must be at most 65536 bytes long"),
    ],
)
async def test_a_description_that_is_none_is_refused_by_name(
    client: Client, structure: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){words}"):
        await generate(client, 1, 0.0, "off", structured_outputs=structure)


async def test_the_grammar_alone_says_where_a_text_may_end(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling\.ignore_eos must be unset or false with structured_outputs"):
        await generate(client, 1, 0.0, "off", structured_outputs={"regex": "a+"}, ignore_eos=True)
