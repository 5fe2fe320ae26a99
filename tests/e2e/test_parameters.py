"""Every sampling parameter under every method: the text is that of `off`, and at temperature 0 that of transformers."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from outrider.models.loading import build_hf_model
from outrider.v1 import types_pb2, verifier_pb2_grpc
from outrider_cli.prompts import load_prompts
from outrider_client import Client, OutriderError, Result
from outrider_client.errors import InvalidArgument, OutOfRange
from outrider_client.requests import generate_request
from tests.support.laws import Law, law_of, p_value
from tests.support.variants import VARIANTS, options_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

NUM_TOKENS = 40
PROMPTS = [prompt.text for prompt in load_prompts("demo")][:4]
BAD_WORDS = ["self", "return", "def test"]

PARAMETERS: dict[str, Mapping[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8, "presence_penalty": -0.5},
    "bias": {"logit_bias": {10: 4.0, 11: -100.0, 300: 2.5}},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(5, 200)), "ignore_eos": False},
    "bad_words": {"bad_words": BAD_WORDS},
    "stop": {"stop": ["\n\n", "):", "self."]},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {20: 3.0},
        "bad_words": ["self"],
        "min_tokens": 10,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "stop": ["\n\n", "):"],
        "logprobs": 3,
    },
}


async def generate(client: Client, prompt: str, temperature: float, variant: str, given: Mapping[str, Any]) -> Result:
    options = {"ignore_eos": True, **options_of(variant), **given}
    return await client.complete(prompt, temperature=temperature, seed=5, max_tokens=NUM_TOKENS, **options)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_parameter_gives_the_text_of_off_under_every_method(client: Client, name: str, full: bool) -> None:
    number = list(PARAMETERS).index(name)
    prompts = PROMPTS if full else PROMPTS[number % 4 :][:1]
    variants = VARIANTS if full else ("off", *VARIANTS[1 + number % 3 :: 3])
    for temperature in (0.0, 0.8):
        for prompt in prompts:
            results = await asyncio.gather(
                *(generate(client, prompt, temperature, variant, PARAMETERS[name]) for variant in variants)
            )
            for variant, result in zip(variants, results, strict=True):
                assert said(result) == said(results[0]), f"{variant} at temperature {temperature}"


PREDICTING = [
    name
    for name in VARIANTS
    if name.startswith(("retrieval", "double", "auto")) or ("+" in name and not name.startswith("off"))
]
"""Variants that look up continuations in the verifier, and so in a prediction."""


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_prediction_gives_the_text_of_off_under_every_method_that_looks_into_it(
    client: Client, temperature: float
) -> None:
    plain = await generate(client, PROMPTS[2], temperature, "off", {})
    words = plain.text.split(" ")
    words[len(words) // 2] = "another"
    given = {"prediction": " ".join(words)}
    results = [await generate(client, PROMPTS[2], temperature, variant, given) for variant in PREDICTING]
    for variant, result in zip(PREDICTING, results, strict=True):
        assert said(result) == said(plain), variant
    counts = {count.source for result in results for count in result.summary.accepted_by_source}
    assert types_pb2.SOURCE_PREDICTION in counts


def said(result: Result) -> tuple[Any, ...]:
    told = [(each.rank, [token_id for token_id, _ in each.top]) for each in result.logprobs]
    return result.token_ids, result.text, result.finish_reason, result.stop_string, result.stop_token_id, told


@pytest.mark.parametrize("name", ["repetition", "bias", "bad_words", "min_tokens"])
async def test_greedy_text_is_that_of_transformers_with_the_same_parameters(client: Client, name: str) -> None:
    model, tokenizer = build_hf_model("demo/target", "float32")
    given = dict(PARAMETERS[name])
    options: dict[str, Any] = {"eos_token_id": given.get("stop_token_ids")}
    if penalty := given.get("repetition_penalty"):
        options["repetition_penalty"] = penalty
    if bias := given.get("logit_bias"):
        options["sequence_bias"] = [[[token_id], value] for token_id, value in bias.items()]
    if given.get("bad_words"):
        spellings = [spelling for word in BAD_WORDS for spelling in (word, f" {word}")]
        options["bad_words_ids"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in spellings]
    if given.get("min_tokens"):
        options["min_new_tokens"] = given["min_tokens"]
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            expected = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, **options)
        result = await generate(client, prompt, 0.0, "best-first", given)
        stop = [] if result.stop_token_id is None else [result.stop_token_id]
        assert [*result.token_ids, *stop] == expected[0, ids.shape[1] :].tolist(), prompt


LAW = {
    "temperature": 1.3,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {10: 3.0, 11: 2.0, 300: 2.5},
    "min_p": 0.02,
    "top_k": 3,
}
LAW_LENGTH = 4
"""Tokens of a text. The last ones may be drafted."""
NUM_LAW_TEXTS, NUM_FULL_LAW_TEXTS = 320, 6400


@cache
def law_by_transformers(prompt_token_ids: tuple[int, ...]) -> Law:
    """The law of texts by transformers' model and processors, and the two penalties that it lacks."""
    model, _ = build_hf_model("demo/target", "float32")
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in LAW["logit_bias"].items()]),
            RepetitionPenaltyLogitsProcessor(LAW["repetition_penalty"]),
        ]
    )
    filters = LogitsProcessorList(
        [TemperatureLogitsWarper(LAW["temperature"]), TopKLogitsWarper(LAW["top_k"]), MinPLogitsWarper(LAW["min_p"])]
    )

    @torch.inference_mode()
    def scores(text: tuple[int, ...]) -> Tensor:
        token_ids = torch.tensor([[*prompt_token_ids, *text]])
        logits = processors(token_ids, model(token_ids).logits[:, -1].float())
        for token_id, count in Counter(text).items():
            logits[:, token_id] -= LAW["frequency_penalty"] * count + LAW["presence_penalty"]
        return filters(token_ids, logits)[0]

    return law_of(scores, LAW_LENGTH)


# All methods share the rule of acceptance, so those that draft otherwise are tried only in longer runs.
LAW_VARIANTS = [
    "speculative",
    *(pytest.param(name, marks=pytest.mark.suite) for name in ("off", "best-first tree", "auto")),
]


@pytest.mark.parametrize("variant", LAW_VARIANTS)
async def test_texts_have_the_distribution_that_transformers_gives_them(
    client: Client, variant: str, full: bool
) -> None:
    # At one temperature, with noise that is keyed by seeds, the texts of one request are drawn independently.
    given = {**LAW, **options_of(variant), "n": 16, "max_tokens": LAW_LENGTH + 1, "ignore_eos": True}
    num_texts = NUM_FULL_LAW_TEXTS if full else NUM_LAW_TEXTS
    results = [await client.complete(PROMPTS[3], seed=seed, **given) for seed in range(num_texts // 16)]
    choices = [choice for result in results for choice in result.choices]
    if variant == "speculative":  # it waits for its drafts; those of others may come too late for so short a text
        assert sum(choice.summary.num_accepted_tokens for choice in choices) > num_texts // 8
    law = law_by_transformers(tuple(await client.tokenize(PROMPTS[3])))
    texts = [choice.token_ids[:LAW_LENGTH] for choice in choices]
    assert set(texts) <= law.keys()
    for place in range(LAW_LENGTH - 1):
        assert p_value(texts, law, slice(place, place + 2)) > 1e-6


# Stop strings.


async def test_a_text_with_stop_strings_is_resumed_exactly_wherever_it_was_broken_off(client: Client) -> None:
    plain = await generate(client, PROMPTS[1], 0.0, "off", {})
    given = {"stop": [plain.text[60:66]]}
    whole = await generate(client, PROMPTS[1], 0.0, "pearl", given)
    texts = []
    for number in range(1, len(whole.token_ids) + 1):
        rest = await generate(client, PROMPTS[1], 0.0, "off", {**given, "resume_token_ids": whole.token_ids[:number]})
        assert (*whole.token_ids[:number], *rest.token_ids) == whole.token_ids
        assert rest.stop_string == whole.stop_string
        assert whole.text.endswith(rest.text)
        texts.append(rest.text)
    assert texts[-1] == ""


# Other fields than the text.


@pytest.mark.parametrize("variant", ["off", "pearl", "best-first tree", "retrieval", "auto"])
async def test_logprobs_are_those_of_transformers(client: Client, variant: str) -> None:
    model, tokenizer = build_hf_model("demo/target", "float32")
    for temperature in (0.0, 1.0):
        given = {"logprobs": 5, "prompt_logprobs": 2, "echo": True, "presence_penalty": 0.5}
        result = await generate(client, PROMPTS[2], temperature, variant, given)
        prompt = tokenizer(PROMPTS[2])["input_ids"]
        assert (list(result.prompt_token_ids), result.prompt_text) == (prompt, PROMPTS[2])
        text = [*prompt, *result.token_ids]
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0].log_softmax(-1)
        told = [*result.prompt_logprobs, *result.logprobs]
        assert (len(told), len(result.logprobs)) == (len(text) - 1, len(result.token_ids))
        for token_id, row, each in zip(text[1:], expected, told, strict=False):
            assert each.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            values, _ = row.topk(len(each.top))
            assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)
            assert (each.rank == 1) == (each.top[0][0] == token_id)
        assert {len(each.top) for each in result.logprobs} == {5}


async def test_processed_logprobs_are_of_what_is_drawn_from(client: Client) -> None:
    given = {"logprobs": 20, "top_k": 3, "logprobs_mode": "processed-logprobs"}
    result = await generate(client, PROMPTS[0], 0.7, "pearl", given)
    for each in result.logprobs:
        probabilities = [2.718281828**value for _, value in each.top]
        assert sum(probabilities[:3]) == pytest.approx(1.0, abs=1e-4)
        assert sum(probabilities[3:]) == 0
        assert each.rank <= 3


async def test_a_round_tells_what_it_did(client: Client) -> None:
    async with client.generate(
        PROMPTS[0], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, method="pearl", rounds=True
    ) as generation:
        rounds = [chunk.round async for chunk in generation]
    assert all(each is not None and each.times.round_ms > 0 and each.num_forward_rows > 0 for each in rounds)
    summary, metrics = generation.result.summary, generation.result.summary.speculative_decoding
    drafted = sum(count.num_tokens for each in rounds if each for count in each.drafted_by_source)
    assert drafted == summary.num_drafted_tokens == metrics.num_draft_tokens
    assert metrics.num_accepted_draft_tokens == summary.num_accepted_tokens
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps
    assert sum(i * n for i, n in enumerate(metrics.acceptance_histogram)) == summary.num_accepted_tokens


async def test_a_tree_says_what_its_round_verified_and_the_chunk_what_was_kept_of_it(client: Client) -> None:
    num_kept = num_branches = 0
    async with client.generate(
        PROMPTS[0], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, method="best-first", rows="tree", trees=True
    ) as generation:
        async for chunk in generation:
            assert chunk.round is not None
            assert chunk.round.HasField("tree")
            tree = chunk.round.tree
            assert len(tree.parents) == len(tree.token_ids) == len(tree.costs) == len(tree.sources) == chunk.num_drafted
            assert all(0 <= parent <= place for place, parent in enumerate(tree.parents))
            num_branches += len(tree.parents) - len(set(tree.parents))
            tip = 0
            for token_id in chunk.token_ids[: chunk.round.num_accepted_tokens]:
                children = [place for place, parent in enumerate(tree.parents) if parent == tip]
                (kept,) = (place for place in children if tree.token_ids[place] == token_id)
                tip, num_kept = kept + 1, num_kept + 1
    assert num_kept == generation.result.summary.num_accepted_tokens
    assert num_kept > 0
    assert num_branches > 0


async def test_a_resumed_text_has_the_ends_of_the_text_that_was_not_broken_off(client: Client) -> None:
    given = {"text_ends": True, "stop": ["zzz"], "method": "pearl", "temperature": 0, "max_tokens": NUM_TOKENS}
    async with client.generate(PROMPTS[1], **given) as generation:
        ends = [end for chunk in [chunk async for chunk in generation] for end in chunk.text_ends]
    text = generation.result.text
    assert len(ends) == len(generation.result.token_ids)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    resumed = generation.result.token_ids[:10]
    async with client.generate(PROMPTS[1], **given, resume_token_ids=resumed) as again:
        later = [end for chunk in [chunk async for chunk in again] for end in chunk.text_ends]
    assert [len(text) - len(again.result.text) + end for end in later] == ends[10:]


async def test_a_long_prompt_is_cut_to_its_last_tokens(client: Client) -> None:
    whole = await client.tokenize(PROMPTS[0])
    cut = await client.complete(
        PROMPTS[0], truncate_prompt_tokens=7, echo=True, max_tokens=8, temperature=0, ignore_eos=True
    )
    asked = await client.complete(whole[-7:], max_tokens=8, temperature=0, ignore_eos=True)
    assert (cut.prompt_token_ids, cut.token_ids) == (tuple(whole[-7:]), asked.token_ids)


# Several texts of one prompt.


@pytest.mark.parametrize("variant", ["off", "pearl", "best-first tree", "auto"])
async def test_each_of_several_texts_is_that_of_its_seed_alone(client: Client, variant: str) -> None:
    given = {"logprobs": 1, "prompt_logprobs": 0, "stop": ["\n\n\n"]}
    result = await generate(client, PROMPTS[0], 0.9, variant, {"n": 4, **given})
    assert (len(result.choices), len({choice.seed for choice in result.choices})) == (4, 4)
    assert said(result) == said(result.choices[0])
    assert [bool(choice.prompt_logprobs) for choice in result.choices] == [True, False, False, False]
    for choice in result.choices:
        alone = await client.complete(
            PROMPTS[0], temperature=0.9, seed=choice.seed, max_tokens=NUM_TOKENS, ignore_eos=True, method="off", **given
        )
        assert said(choice) == said(alone)


async def test_several_structured_texts_are_each_valid(client: Client) -> None:
    given = {"n": 3, "structured_outputs": {"regex": "[a-z]{4}-[0-9]{3}"}, "ignore_eos": None}
    result = await generate(client, PROMPTS[0], 1.0, "pearl", given)
    assert all(re.fullmatch("[a-z]{4}-[0-9]{3}", choice.text) for choice in result.choices)


async def test_several_texts_are_resumed_each_from_what_it_had_come_to(client: Client) -> None:
    whole = (await generate(client, PROMPTS[0], 0.9, "off", {"n": 3})).choices
    request = generate_request(
        PROMPTS[0], {"temperature": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": 3}
    )
    request.resume_choices.add(token_ids=whole[0].token_ids[:7])
    request.resume_choices.add(token_ids=whole[1].token_ids, is_finished=True)
    request.resume_choices.add()
    token_ids: dict[int, list[int]] = {}
    async with grpc.aio.insecure_channel(client.address) as channel:
        async for response in verifier_pb2_grpc.VerifierServiceStub(channel).Generate(request):
            token_ids.setdefault(response.index, []).extend(response.chunk.token_ids)
    assert token_ids == {0: list(whole[0].token_ids[7:]), 2: list(whole[2].token_ids)}


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"n": 0}, InvalidArgument, r"n must be in \[1, 16\], this server's limit, got 0"),
        ({"n": 17}, InvalidArgument, r"n must be in \[1, 16\]"),
        ({"n": 16, "max_tokens": 100_000}, OutOfRange, r"for each of the n \(16\) texts"),
        ({"n": 2, "resume_token_ids": [5]}, InvalidArgument, "resume_token_ids must be empty where n is 2"),
    ],
)
async def test_several_texts_beyond_a_limit_are_refused_before_work_starts(
    client: Client, given: dict[str, Any], error: type[OutriderError], words: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **given}
    with pytest.raises(error, match=words):
        await client.complete(PROMPTS[0], **options)
